"""Qwen2 and Qwen2.5 (arXiv:2412.15115): queries, keys and values have biases, nothing else has."""

from __future__ import annotations

import torch

from paceline.model.communicator import Communicator
from paceline.model.config import ModelConfig
from paceline.model.decoder import Attention, CausalLM, DecoderLayer, GatedMLP


class Qwen2ForCausalLM(CausalLM):
    """Dense Qwen2 and Qwen2.5."""

    @staticmethod
    def build_layer(config: ModelConfig, index: int, comm: Communicator, dtype: torch.dtype) -> DecoderLayer:
        attention = Attention(config, index, comm, dtype, qkv_bias=True)
        return DecoderLayer(config, dtype, attention, GatedMLP(config, comm, dtype))
