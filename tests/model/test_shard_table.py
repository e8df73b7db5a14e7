"""What a rank holds of a model, from the config alone."""

from __future__ import annotations

import pytest
import torch
from models import MODELS

from paceline.model.config import ModelConfig
from paceline.model.shard_table import ModelPlan, plan_model

QWEN3_8B = MODELS["qwen3-8b"]
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def plan(config: dict[str, object], tp: int) -> ModelPlan:
    return plan_model(ModelConfig.from_dict(config), tp, torch.bfloat16)


def test_one_rank_holds_every_parameter_once() -> None:
    assert plan(QWEN3_8B, 1).weight_bytes == 2 * 8_190_735_360  # as Qwen's card counts them
    assert plan(SMOLLM2, 1).weight_bytes == 2 * 134_515_008


@pytest.mark.parametrize(("tp", "expected"), [(1, 147456), (2, 73728), (8, 18432), (16, 18432)])
def test_cache_bytes_of_a_token(tp: int, expected: int) -> None:
    assert plan(QWEN3_8B, tp).kv_bytes_per_token == expected


def test_two_ranks_hold_half_and_the_norms() -> None:
    norms = 2 * (36 * (2 * 4096 + 2 * 128) + 4096)
    assert plan(QWEN3_8B, 2).weight_bytes == (2 * 8_190_735_360 - norms) // 2 + norms


@pytest.mark.parametrize(
    ("tp", "name", "rule", "shape"),
    [
        (1, "model.layers.0.self_attn.qkv_proj.weight", "whole", (960, 576)),
        (3, "model.layers.0.self_attn.qkv_proj.weight", "rows of q, k, v", (320, 576)),
        (2, "model.layers.0.self_attn.qkv_proj.weight", "rows of q, k, v; 25.0% padding", (640, 576)),
        (
            6,
            "model.layers.0.self_attn.qkv_proj.weight",
            "rows of q, k, v; k, v on 2 ranks each; 12.5% padding",
            (256, 576),
        ),
        (2, "model.layers.29.self_attn.o_proj.weight", "columns; 25.0% padding", (576, 384)),
        (5, "model.layers.3.mlp.down_proj.weight", "columns; 1.5% padding", (576, 312)),
        (2, "model.layers.3.mlp.gate_up_proj.weight", "rows of gate, up", (1536, 576)),
        (8, "model.embed_tokens.weight", "rows", (6144, 576)),
        (8, "model.norm.weight", "whole", (576,)),
    ],
)
def test_rules_in_words(tp: int, name: str, rule: str, shape: tuple[int, ...]) -> None:
    (parameter,) = [each for each in plan(SMOLLM2, tp).parameters if each.name == name]
    assert (parameter.rule, parameter.shape) == (rule, shape)
