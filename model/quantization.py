"""Quantised checkpoints are refused by the name of their method, in whichever file a tool has put it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.model.errors import ModelConfigError
from paceline.model.json_fields import JsonFields, read_json_object, shown

QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Where some tools put what others put into config.json."""
_FILE_OF_GPTQ = "quantize_config.json"
_NAMES_OF_METHOD = ("quant_method", "quant_algo", "version")


def refuse_quantized(config: JsonFields) -> None:
    """Raise ModelConfigError where a config.json has a quantization_config, whatever that holds."""
    told = config.get("quantization_config")
    if told is not None:
        raise config.error(f"quantization_config: {_refusal(_method(told))}")


def refuse_quantization_files(folder: Path) -> None:
    """Raise ModelConfigError where a file beside config.json says that the weights are quantised, and how."""
    for name in QUANTIZATION_FILES:
        path = folder / name
        if not path.exists():
            continue
        content = read_json_object(path)
        method = _method(content.get("quantization", content)) or ("gptq" if name == _FILE_OF_GPTQ else None)
        raise ModelConfigError(f"{path}: {_refusal(method)}")


def _method(told: Any) -> str | None:
    """The method's name, from an object of a quantisation's fields, or what stands in its place."""
    if not isinstance(told, dict):
        return told if isinstance(told, str) else None
    return next((told[name] for name in _NAMES_OF_METHOD if told.get(name) and isinstance(told[name], str)), None)


def _refusal(method: str | None) -> str:
    named = "of an unknown method" if not method else shown(method)
    return f"quantization {named} is not supported; use the unquantized checkpoint"
