"""The rotary-embedding fields of a config.json, in both of their spellings.

Published checkpoints have `rope_theta` and `rope_scaling`; transformers 5 writes all of it into `rope_parameters`.
A type or field that is not known is refused: running it unscaled would give fluent nonsense at long positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.model.errors import ModelConfigError
from paceline.model.json_fields import JsonFields, merge_spellings, shown

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
MAX_FACTOR = 2.0**24
"""Of a context's stretch; as long as the longest context may be."""
_FIELDS = frozenset(
    {
        "rope_type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions turn into angles; fields that a type does not use keep their defaults."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    """By how much the context is stretched (linear, dynamic, llama3, yarn)."""
    original_max_position_embeddings: int = 0
    """Context before stretching (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    """What yarn scales cos and sin by; None follows from factor, mscale and mscale_all_dim."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: str) -> RopeConfig:
        """Read a whole config.json's fields; ModelConfigError names what is missing, unknown or contradictory."""
        fields = JsonFields(_merged_fields(config, where), where)
        rope_type = fields.text("rope_type", "default")
        theta = fields.number("rope_theta", 10000.0)
        if rope_type == "default":
            return cls(theta=theta)
        if rope_type not in ROPE_TYPES:
            raise fields.error(f"rope type {shown(rope_type)} is not supported; {', '.join(ROPE_TYPES)} are")
        factor = _require(fields, rope_type, "factor")
        if not 1 <= factor <= MAX_FACTOR:
            raise fields.error(
                f"factor of rope type {rope_type} must be at least 1, at most {MAX_FACTOR:.0f}, got {factor}"
            )
        if rope_type == "llama3":
            return _llama3(fields, theta, factor)
        if rope_type == "yarn":
            return _yarn(fields, theta, factor)
        return cls(rope_type=rope_type, theta=theta, factor=factor)


def _merged_fields(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All rope fields under their new names; those of a nested object and of the top level must agree."""
    groups: list[Mapping[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):
        group = config.get(name)
        if group is None:
            continue
        if not isinstance(group, dict):
            raise ModelConfigError(f"{where}: {name} must be an object, got {shown(group)}")
        group = dict(group)
        groups += [{"rope_type": group.pop("type", None)}, group]
        for field, value in group.items():
            if field not in _FIELDS and value is not None:
                raise ModelConfigError(f"{where}: rope field {shown(field)} of {name} is not supported")
    top_level = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    groups.append({name: config.get(name) for name in top_level})
    merged = merge_spellings(where, *groups)
    rotated = JsonFields(merged, where).number("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise ModelConfigError(
            f"{where}: partial_rotary_factor {rotated} is not supported; it must be 1, so that whole heads are rotated"
        )
    return merged


def _require(fields: JsonFields, rope_type: str, name: str) -> float:
    _check_given(fields, rope_type, name)
    return fields.number(name)


def _original_length(fields: JsonFields, rope_type: str) -> int:
    _check_given(fields, rope_type, "original_max_position_embeddings")
    return fields.size("original_max_position_embeddings")


def _check_given(fields: JsonFields, rope_type: str, name: str) -> None:
    if fields.get(name) is None:
        raise fields.error(f"rope type {rope_type} needs the field {name}")


def _llama3(fields: JsonFields, theta: float, factor: float) -> RopeConfig:
    low, high = (_require(fields, "llama3", name) for name in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise fields.error(f"high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=_original_length(fields, "llama3"),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(fields: JsonFields, theta: float, factor: float) -> RopeConfig:
    def optional(name: str) -> float | None:
        return None if fields.get(name) is None else fields.number(name)

    if theta <= 1:
        raise fields.error(f"rope_theta of rope type yarn must be above 1, got {theta}")
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=_original_length(fields, "yarn"),
        attention_factor=optional("attention_factor"),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=fields.flag("truncate", True),
    )
