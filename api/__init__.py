"""paceline: tensor-parallel inference of language models.

>>> from paceline import LLM, SamplingParams
>>> LLM("path/or/hub-id").generate("The history of Rome", SamplingParams(max_tokens=32))

Names are loaded on first use, so that importing paceline costs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.coordinator.sampling_params import SamplingParams
    from paceline.launcher import structured_output
    from paceline.launcher.llm import LLM, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__", "structured_output"]

_HOMES = {
    "LLM": "paceline.launcher.llm",
    "RequestOutput": "paceline.launcher.llm",
    "SamplingParams": "paceline.coordinator.sampling_params",
    "structured_output": "paceline.launcher.structured_output",
}
"""The module that each name is in, or is."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_HOMES[name])
    value = module if _HOMES[name].endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
