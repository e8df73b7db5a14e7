"""Angles equal those of transformers; the table reaches as far as texts may, and no further than the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_configs import LLAMA, LLAMA3
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.model.config import ModelConfig
from paceline.model.errors import ModelConfigError
from paceline.model.rope import check_max_model_len, cos_sin_table, inverse_frequencies, longest_context

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 1.25},
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-betas": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
}


def both_configs(rope: dict[str, Any], max_positions: int, theta: float = 500000.0) -> tuple[ModelConfig, LlamaConfig]:
    rope = rope | {"rope_theta": theta}
    fields = LLAMA | {"hidden_size": 256, "max_position_embeddings": max_positions, "rope_parameters": rope}
    return ModelConfig.from_dict(fields), LlamaConfig(**fields)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_inverse_frequencies_equal_transformers(rope: dict[str, Any], theta: float) -> None:
    config, theirs = both_configs(rope, 8192, theta)
    reference = LlamaRotaryEmbedding(theirs)
    inv_freq, attention_factor = inverse_frequencies(config, 8192)
    torch.testing.assert_close(inv_freq, reference.inv_freq, atol=0, rtol=1e-6)
    assert attention_factor == pytest.approx(reference.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_the_table_equals_transformers_at_every_position(rope: dict[str, Any]) -> None:
    config, theirs = both_configs(rope, 8192)
    table = cos_sin_table(config, 8192)
    assert table.shape == (8192, 64)
    assert table.dtype == torch.float32
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(8192)[None])
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], atol=1e-6, rtol=0)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], atol=1e-6, rtol=0)


def test_llama3_at_a_far_position() -> None:
    config, theirs = both_configs(LLAMA3, 131072)
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.tensor([[9000]]))
    row = cos_sin_table(config, 16384)[9000]
    torch.testing.assert_close(row, torch.cat((cos[0, 0, :32], sin[0, 0, :32])), atol=1e-6, rtol=0)


def test_dynamic_is_plain_for_short_texts_and_fixed_by_max_model_len_for_long_ones() -> None:
    config, theirs = both_configs(ROPES["dynamic"], 1024)
    plain, _ = both_configs(ROPES["default"], 1024)
    assert torch.equal(inverse_frequencies(config, 1024)[0], inverse_frequencies(plain, 1024)[0])
    assert torch.equal(inverse_frequencies(config, 100)[0], inverse_frequencies(plain, 100)[0])
    reference = LlamaRotaryEmbedding(theirs)
    reference(torch.zeros(1), torch.arange(2048)[None])
    torch.testing.assert_close(inverse_frequencies(config, 2048)[0], reference.inv_freq, atol=0, rtol=1e-6)


@pytest.mark.parametrize(
    ("rope", "max_positions", "longest"),
    [
        ("default", 128, 128),
        ("linear", 128, 512),
        ("dynamic", 128, 256),
        ("llama3", 131072, 131072),
        ("yarn", 2048, 8192),
        ("yarn", 8192, 8192),
    ],
)
def test_max_model_len_reaches_as_far_as_the_rope_type_scales(rope: str, max_positions: int, longest: int) -> None:
    config, _ = both_configs(ROPES[rope], max_positions)
    assert longest_context(config) == longest
    check_max_model_len(config, longest)
    with pytest.raises(ModelConfigError) as error:
        cos_sin_table(config, longest + 1)
    assert str(error.value).startswith(f"max_model_len must be at most {longest}")


def test_the_table_covers_max_model_len_exactly() -> None:
    config, _ = both_configs(ROPES["default"], 128)
    assert cos_sin_table(config, 128).shape[0] == 128
    assert cos_sin_table(config, 50).shape[0] == 50
