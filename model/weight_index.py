"""The index of a checkpoint in several files: which file holds which tensor."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from paceline.model.errors import CheckpointError
from paceline.model.json_text import parse_json
from paceline.model.regular_files import read_regular
from paceline.model.safetensors_header import HeaderError, check_is_no_pointer

INDEX_NAME = "model.safetensors.index.json"


def read_weight_map(index: Path) -> dict[str, str]:
    """The index's tensor names, each with the name of its file; CheckpointError where it is none."""
    try:
        content = read_regular(index)
        check_is_no_pointer(content)
        weight_map = parse_json(content)["weight_map"]
    except HeaderError as error:
        raise CheckpointError(f"{index} {error}") from None
    except OSError as error:
        raise CheckpointError(f"{index} cannot be opened: {error.strerror or error}") from None
    except (TypeError, KeyError):
        raise CheckpointError(f"{index} cannot be read as a safetensors index: it has no weight_map") from None
    except ValueError as error:
        raise CheckpointError(f"{index} cannot be read as a safetensors index: {error}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must give a file name for each tensor")
    for name in weight_map:
        if not name.isprintable():
            raise CheckpointError(f"{index}: weight_map names a tensor {name!a}, which is not printable")
    return weight_map


def refusal_of_name(file_name: str) -> str | None:
    """Why a file that an index names is not opened."""
    path = PurePosixPath(file_name)
    if not file_name.isprintable():
        return "is not printable"
    if path.is_absolute() or ".." in path.parts:
        return "is outside the folder"
    if path.suffix != ".safetensors":
        return "is not a .safetensors file, the only format of weights that is read"
    return None
