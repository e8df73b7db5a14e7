"""The config.json of tiny models, and the rope scaling of a real one, for tests to use as they are or with changes."""

from __future__ import annotations

from typing import Any

from models import MODELS

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **SIZES}
"""Nothing but what a config must say, and the KV heads."""
QWEN3: dict[str, Any] = SIZES | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
"""Enough for an engine to start."""
LLAMA3: dict[str, Any] = MODELS["llama3.2-1b"]["rope_scaling"]
