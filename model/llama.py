"""Llama (arXiv:2407.21783) and models of its shape, such as SmolLM2: biases only where the config says so."""

from __future__ import annotations

import torch

from paceline.model.communicator import Communicator
from paceline.model.config import ModelConfig
from paceline.model.decoder import Attention, CausalLM, DecoderLayer, GatedMLP


class LlamaForCausalLM(CausalLM):
    """Llama 2, 3, 3.1, 3.2, SmolLM2."""

    @staticmethod
    def build_layer(config: ModelConfig, index: int, comm: Communicator, dtype: torch.dtype) -> DecoderLayer:
        bias = config.attention_bias
        attention = Attention(config, index, comm, dtype, qkv_bias=bias, output_bias=bias)
        return DecoderLayer(config, dtype, attention, GatedMLP(config, comm, dtype, bias=config.mlp_bias))
