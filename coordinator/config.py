"""Settings of one engine, each spelled once; coordinator and workers read the same object."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.coordinator.checks import check_integer, check_number, check_switch, shown
from paceline.coordinator.errors import InputError
from paceline.coordinator.policies import POLICIES

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("safetensors", "dummy")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. What None stands for is decided once the model and the memory are known.

    Every value is checked on construction; a bad one raises InputError naming the field.
    """

    model: str
    """Folder or hub id of a Hugging Face checkpoint, or "" for the default model; the ranks are given the folder."""
    tensor_parallel_size: int = 1
    """Ranks over which each layer is split."""
    device: str = "auto"
    """`cuda` where a GPU is seen, else `cpu`."""
    dtype: str = "auto"
    """Of weights, activations and cache; auto is the checkpoint's own."""
    load_format: str = "safetensors"
    """`dummy` fills the model with seeded random weights, the same at any number of ranks."""
    max_model_len: int | None = None
    """Most tokens of one request; None is the checkpoint's own length."""
    block_size: int = 16
    """Tokens a cache block holds; a power of two."""
    num_blocks: int | None = None
    """Cache blocks a rank holds; None sizes them from memory."""
    cache_memory_share: float | None = None
    """Share of the device's memory (of the host's, on CPU) that weights, workspace and cache may take in all;
    None is 0.9 on a GPU and 0.4 on CPU."""
    max_num_seqs: int = 256
    """Most requests running at once."""
    max_batched_tokens: int = 2048
    """Most tokens computed in one step."""
    prefix_cache: bool = True
    """Share the blocks of equal prefixes between requests."""
    policy: str = "prompts-first"
    """Named scheduling policy: which requests a step's token budget goes to first."""

    check_lockstep: bool = False
    """Compare step number, rows and tokens across ranks in every step (slow; for debugging)."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise InputError(f"model must be a text, a folder or a hub id, got {shown(self.model)}")
        for name, choices in (
            ("dtype", DTYPES),
            ("device", DEVICES),
            ("load_format", LOAD_FORMATS),
            ("policy", tuple(POLICIES)),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise InputError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")
        for name in ("tensor_parallel_size", "max_num_seqs", "max_batched_tokens", "block_size"):
            check_integer(name, getattr(self, name), 1)
        for name, least in (("max_model_len", 2), ("num_blocks", 1)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least)
        if self.block_size & (self.block_size - 1):
            raise InputError(f"block_size must be a power of two, got {self.block_size}")
        if self.cache_memory_share is not None:
            check_number("cache_memory_share", self.cache_memory_share, 0, 1, above_low=True)
        for name in ("prefix_cache", "check_lockstep"):
            check_switch(name, getattr(self, name))
