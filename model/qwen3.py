"""Qwen3 (arXiv:2505.09388): each head of queries and keys is normalised before the rotation."""

from __future__ import annotations

import torch

from paceline.model.communicator import Communicator
from paceline.model.config import ModelConfig
from paceline.model.decoder import Attention, CausalLM, DecoderLayer, GatedMLP


class Qwen3ForCausalLM(CausalLM):
    """Dense Qwen3."""

    @staticmethod
    def build_layer(config: ModelConfig, index: int, comm: Communicator, dtype: torch.dtype) -> DecoderLayer:
        bias = config.attention_bias
        attention = Attention(config, index, comm, dtype, qkv_bias=bias, output_bias=bias, qk_norm=True)
        return DecoderLayer(config, dtype, attention, GatedMLP(config, comm, dtype))
