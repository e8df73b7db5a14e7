"""Host memory that the pieces of a checkpoint pass through on their way to parameters."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

READERS = 8
BUFFERS_PER_READER = 2
PIECE_BYTES = 8 << 20
_ALIGNMENT = 256
"""Of each buffer, so that it can hold elements of any type."""


class StagingMemory:
    """Buffers of one size, cut from a single allocation, which is pinned where the device is a GPU.

    To pin memory takes tens of milliseconds. So it is begun here, for pieces of the usual size, in a thread of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        pool = ThreadPoolExecutor(1, thread_name_prefix="pin-memory")
        self._usual = pool.submit(self._allocate, num_readers() * BUFFERS_PER_READER * PIECE_BYTES)
        pool.shutdown(wait=False)

    def buffers(self, count: int, size: int) -> list[torch.Tensor]:
        """So many of uint8 and of at least that size, for one user at a time.

        RuntimeError where the system does not give the memory.
        """
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        memory = self._usual.result()
        if count * size > len(memory):
            memory = self._allocate(count * size)
        return list(memory[: count * size].view(count, size))

    def _allocate(self, size: int) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        with torch.cuda.device(self._device):  # another thread's choice does not count here
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def num_readers() -> int:
    """Threads that read at the same time: one a processor, up to READERS."""
    return min(READERS, len(os.sched_getaffinity(0)))
