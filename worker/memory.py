"""A rank's memory: how many cache blocks fit it, what has been set aside in it, and how much is in use."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.errors import InputError

GPU_SHARE = 0.9
CPU_SHARE = 0.4
GIB = 1 << 30
BESIDE_TORCH = GIB
"""What a process holds on a GPU beside torch's allocator: the CUDA context, loaded kernels, graphs. 0.9 GiB were
measured on an H200; it is not looked up, since the driver does not tell it apart from what others hold."""
MEASURE_SECONDS = 1.0
"""Memory in use is not looked up more often: asking a GPU's driver may take as long as a short step."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that a rank has set aside once it has started, and those of its device."""

    weights: int
    cache: int
    workspace: int
    """Activations, batch state and CUDA graphs; on the CPU the batch state alone, since the rest comes and goes."""
    total: int
    """Of the device; on the CPU what this host's ranks may use together."""


def size_cache(
    config: EngineConfig, device: torch.device, block_bytes: int, max_model_len: int, in_use: int, local_ranks: int
) -> int:
    """Blocks this rank can hold: what is left of its share of memory after in_use bytes (weights and workspace).

    On the CPU the ranks of a host divide its memory. More blocks than max_num_seqs requests of full length could use
    are never made. Raises InputError where not even one block fits.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = gpu_budget(config.cache_memory_share or GPU_SHARE, total, free, torch.cuda.memory_reserved(device))
    else:
        budget = int((config.cache_memory_share or CPU_SHARE) * host_memory() / local_ranks)
    most_useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    blocks = min((budget - in_use) // block_bytes, most_useful)
    if blocks < 1:
        raise InputError(
            f"no memory is left for the cache: {in_use / GIB:.2f} GiB are taken by weights and workspace, and the "
            f"share allowed is {budget / GIB:.2f} GiB; raise --cache-memory-share, or lower --max-batched-tokens"
        )
    return blocks


def check_room_for_angles(needed: int, max_model_len: int, local_ranks: int) -> None:
    """Raise InputError where so many bytes for each rank's table of angles are more than this host has."""
    memory = host_memory()
    if needed * local_ranks > memory:
        raise InputError(
            f"max_model_len {max_model_len} takes {needed * local_ranks / GIB:.1f} GiB of host memory for angles of "
            f"all positions, and this machine has {memory / GIB:.1f}; set a lower max_model_len"
        )


def gpu_budget(share: float, total: int, free: int, reserved: int) -> int:
    """Bytes of a GPU that torch's allocator may hold altogether; it has reserved some of what is not free.

    The share is of all that this process holds. Memory that others hold is not ours to plan with.
    """
    beside_torch = total - free - reserved
    return min(int(share * total) - BESIDE_TORCH, total - beside_torch)


def device_memory(device: torch.device) -> int:
    """Bytes of memory that the device has; for the CPU host_memory()."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory()


def memory_in_use(device: torch.device) -> int:
    """Bytes in use on a GPU, by whomever; on the CPU this process's resident memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class MemoryGauge:
    """Memory in use on a device, at most MEASURE_SECONDS old."""

    def __init__(self, measure: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._measure = measure
        self._clock = clock
        self._used = 0
        self._due = float("-inf")

    def read(self) -> int:
        """Bytes in use."""
        now = self._clock()
        if now >= self._due:
            self._used = self._measure()
            self._due = now + MEASURE_SECONDS
        return self._used


def host_memory() -> int:
    """Bytes of memory this process may use: the machine's, or its control group's limit where that is lower."""
    meminfo = Path("/proc/meminfo").read_text()
    total = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemTotal:"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists():
        text = limit.read_text().strip()
        if text.isdigit():
            total = min(total, int(text))
    return total
