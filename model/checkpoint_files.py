"""The safetensors files of a checkpoint folder, opened lazily: headers at once, elements only as they are sliced.

Which files count: where there is a model.safetensors.index.json, the (tensor, file) pairs that it names and nothing
else; where there is none, every *.safetensors of the folder. Other formats (.bin, .pt) are never read, since reading
them runs code. Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.model.errors import CheckpointError

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_LFS_MAGIC = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file; slicing reads only the slice."""

    name: str
    file_name: str
    shape: tuple[int, ...]
    dtype_name: str
    """As in the file's header, such as BF16 or F8_E4M3."""
    _slices: Any = field(repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Raises KeyError for a type that is not in STORED_DTYPES."""
        return STORED_DTYPES[self.dtype_name]

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        piece: torch.Tensor = self._slices[slices]
        return piece


class CheckpointFiles:
    """All tensors of a checkpoint by name, and the faults of its files; a context that keeps the files open."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where the folder has no weights or its index cannot be read.

        What is wrong with single files is put into `faults`, to be reported with everything else.
        """
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.faults: list[str] = []
        self._open_files = ExitStack()
        index = folder / INDEX_NAME
        if index.exists():
            self._open_indexed(index)
        else:
            self._open_all()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()

    def _open_indexed(self, index: Path) -> None:
        tensors_of: dict[str, list[str]] = defaultdict(list)
        for tensor_name, file_name in _read_weight_map(index).items():
            tensors_of[file_name].append(tensor_name)
        for file_name, tensor_names in sorted(tensors_of.items()):
            if _leaves_folder(file_name):
                self.faults.append(f"{INDEX_NAME} names the file {file_name!r}, which is outside the folder")
                continue
            stored = self._open(file_name)
            if stored is None:
                continue
            for tensor_name in sorted(tensor_names):
                if tensor_name in stored:
                    self.tensors[tensor_name] = stored[tensor_name]
                else:
                    self.faults.append(f"{INDEX_NAME} puts tensor {tensor_name} into {file_name}, which lacks it")
        stray = sorted(path.name for path in self.folder.glob("*.safetensors") if path.name not in tensors_of)
        if stray:
            logger.info("not read, since %s does not name them: %s", INDEX_NAME, ", ".join(stray))

    def _open_all(self) -> None:
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.folder} has no *.safetensors files, the only format of weights that is read")
        for path in paths:
            for tensor_name, tensor in (self._open(path.name) or {}).items():
                if tensor_name in self.tensors:
                    other = self.tensors[tensor_name].file_name
                    self.faults.append(f"tensor {tensor_name} is in both {other} and {path.name}")
                self.tensors[tensor_name] = tensor

    def _open(self, file_name: str) -> dict[str, StoredTensor] | None:
        """The tensors of one file; None, and a fault, where it cannot be read."""
        path = self.folder / file_name
        try:
            with path.open("rb") as file:
                if file.read(len(_LFS_MAGIC)) == _LFS_MAGIC:
                    self.faults.append(f"{file_name} is a Git LFS pointer; fetch the file itself with git lfs pull")
                    return None
            handle = self._open_files.enter_context(safe_open(path, framework="pt"))
        except OSError as error:
            self.faults.append(f"{file_name} cannot be opened: {error.strerror or error}")
            return None
        except SafetensorError as error:
            self.faults.append(f"{file_name} is cut short or is not a safetensors file ({error})")
            return None
        tensors = {}
        for name in handle.keys():  # noqa: SIM118 - the handle is no dict
            slices = handle.get_slice(name)
            tensors[name] = StoredTensor(name, file_name, tuple(slices.get_shape()), slices.get_dtype(), slices)
        return tensors


def _read_weight_map(index: Path) -> dict[str, str]:
    """The index's tensor names, each with the name of its file."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique_names)["weight_map"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{index} cannot be read as a safetensors index: {error!r}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must give a file name for each tensor")
    return weight_map


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which json itself would keep only the last of two equal names."""
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it gives {next(name for name in names if names.count(name) > 1)} twice")
    return content


def _leaves_folder(file_name: str) -> bool:
    path = PurePosixPath(file_name)
    return path.is_absolute() or ".." in path.parts
