"""How a model's makers would have its tokens chosen: the sampling rules in a checkpoint's generation_config.json.

https://huggingface.co/docs/transformers/main_classes/text_generation
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.coordinator.errors import InputError
from paceline.coordinator.sampling_params import SamplingParams
from paceline.worker.json_files import read_json

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(folder: Path) -> dict[str, Any]:
    """The fields of SamplingParams that the file in a checkpoint's folder has values for.

    None where there is no file, or where it says that nothing is sampled, whatever else it says. Raises InputError,
    which names the file and the field, for a value that no request could have.
    """
    path = folder / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    if config.get("do_sample") is False:
        return {}
    defaults = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return defaults
