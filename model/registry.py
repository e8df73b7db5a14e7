"""Which class builds which architecture. A new family is a file like qwen3.py, a row here, one in config.FAMILIES."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.model.decoder import CausalLM
from paceline.model.llama import LlamaForCausalLM
from paceline.model.qwen2 import Qwen2ForCausalLM
from paceline.model.qwen3 import Qwen3ForCausalLM

MODEL_CLASSES: Mapping[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
"""By the name in a config's `architectures`."""
