"""Rotary position embedding: the table of cosines and sines (RoFormer, arXiv:2104.09864) and its stretched forms.

The formulas are those of transformers' modeling_rope_utils, in float32, so that angles equal its bit for bit where
the same operations are used. One table serves every layer and covers max_model_len positions exactly.
"""

from __future__ import annotations

import math

import torch

from paceline.model.config import ModelConfig
from paceline.model.errors import ModelConfigError
from paceline.model.rope_config import RopeConfig


def longest_context(config: ModelConfig) -> int:
    """The largest max_model_len that the rope type is made for.

    `linear` and `dynamic` stretch max_position_embeddings by their factor, `yarn` its original length; for `default`
    and `llama3` (whose max_position_embeddings already is the stretched length) it is max_position_embeddings.
    """
    rope = config.rope
    if rope.rope_type in ("linear", "dynamic"):
        return int(config.max_position_embeddings * rope.factor)
    if rope.rope_type == "yarn":
        return max(config.max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
    return config.max_position_embeddings


def check_max_model_len(config: ModelConfig, max_model_len: int) -> None:
    """Raise ModelConfigError where positions below max_model_len go beyond what the model is made for."""
    limit = longest_context(config)
    if max_model_len > limit:
        raise ModelConfigError(
            f"max_model_len must be at most {limit}, the longest text this model is made for "
            f"(max_position_embeddings {config.max_position_embeddings}, rope type {config.rope.rope_type}), "
            f"got {max_model_len}"
        )


def cos_sin_bytes(config: ModelConfig, max_model_len: int) -> int:
    """Host memory that cos_sin_table takes: the table, and the angles, cosines and sines that it is made from."""
    return max_model_len * (config.head_dim + 3 * (config.head_dim // 2)) * torch.float32.itemsize


def cos_sin_table(config: ModelConfig, max_model_len: int) -> torch.Tensor:
    """[max_model_len, head_dim] float32 on the CPU: cosines in the first half of the columns, sines in the second.

    It is computed on the CPU for every device, so that all of them turn by the same angles.
    """
    check_max_model_len(config, max_model_len)
    inv_freq, attention_factor = inverse_frequencies(config, max_model_len)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(attention_factor)


def inverse_frequencies(config: ModelConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """([head_dim / 2] float32 radians a position, factor of cos and sin)."""
    rope, dim = config.rope, config.head_dim
    if rope.rope_type == "dynamic":
        return _unscaled(_dynamic_theta(config, max_model_len), dim), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, dim), _yarn_attention_factor(rope)
    inv_freq = _unscaled(rope.theta, dim)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq), 1.0
    return inv_freq, 1.0


def _unscaled(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic_theta(config: ModelConfig, max_model_len: int) -> float:
    """The NTK-scaled base for texts of max_model_len.

    transformers computes it anew from the longest text of a batch, so that keys cached earlier no longer fit. Here it
    is fixed by max_model_len: up to max_position_embeddings it is the plain base, as in transformers for short texts,
    and beyond it what transformers uses for a text of max_model_len tokens.
    """
    rope, dim = config.rope, config.head_dim
    stretch = max(max_model_len, config.max_position_embeddings) / config.max_position_embeddings
    return float(rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (dim / (dim - 2)))


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: slow waves are divided by the factor, fast ones kept, those between interpolated."""
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > context / rope.low_freq_factor, inv_freq / rope.factor, between)
    return torch.where(wavelength < context / rope.high_freq_factor, inv_freq, scaled)


def _yarn(rope: RopeConfig, dim: int) -> torch.Tensor:
    """YaRN (arXiv:2309.00071): a ramp over the dimensions from kept to divided frequencies."""

    def dimension_of(rotations: float) -> float:
        """Where a wave makes this many rotations in the original context."""
        context = rope.original_max_position_embeddings
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the width of the ramp divides
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inv_freq = _unscaled(rope.theta, dim)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
