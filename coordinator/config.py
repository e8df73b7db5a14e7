"""Settings of one engine, each spelled once; coordinator and workers read the same object."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.coordinator.errors import InputError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("safetensors", "dummy")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. What None stands for is decided once the model and the memory are known."""

    model: str
    """Folder of a Hugging Face checkpoint."""
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
        for name, choices in (("dtype", DTYPES), ("device", DEVICES), ("load_format", LOAD_FORMATS)):
            value = getattr(self, name)
            if value not in choices:
                raise InputError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        for name in ("tensor_parallel_size", "max_num_seqs", "max_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, least in (("max_model_len", 2), ("num_blocks", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} must be at least {least}, got {value}")
        if self.block_size & (self.block_size - 1):
            raise InputError(f"block_size must be a power of two, got {self.block_size}")
        if self.cache_memory_share is not None and not 0 < self.cache_memory_share <= 1:
            raise InputError(f"cache_memory_share must be above 0 and at most 1, got {self.cache_memory_share}")
