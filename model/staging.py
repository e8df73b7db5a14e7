"""Host memory that the pieces of a checkpoint pass through on their way to parameters."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

READERS = 12
BUFFERS_PER_READER = 2
PIECE_BYTES = 8 << 20
_ALIGNMENT = 256
"""Of each buffer, so that it can hold elements of any type."""


class StagingMemory:
    """Each reader's buffers, cut from an allocation of its own, which is pinned where the device is a GPU.

    To pin memory takes tens of milliseconds for all readers. So it is begun here, for pieces of the usual size, in a
    thread of its own; one by one, so that a reader starts as soon as it has its own, and since torch rounds what it
    pins up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        pool = ThreadPoolExecutor(1, thread_name_prefix="pin-memory")
        size = BUFFERS_PER_READER * PIECE_BYTES
        self._usual = [pool.submit(self._allocate, size) for _ in range(num_readers())]
        pool.shutdown(wait=False)

    def buffers(self, reader: int, size: int) -> list[torch.Tensor]:
        """The buffers of one of num_readers() readers, each of uint8 and of at least that size.

        RuntimeError where the system does not give the memory.
        """
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        memory = self._usual[reader].result()
        if BUFFERS_PER_READER * size > len(memory):
            memory = self._allocate(BUFFERS_PER_READER * size)
        return list(memory[: BUFFERS_PER_READER * size].view(BUFFERS_PER_READER, size))

    def _allocate(self, size: int) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        with torch.cuda.device(self._device):  # another thread's choice does not count here
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def num_readers() -> int:
    """Threads that read at the same time: one a processor, up to READERS."""
    return min(READERS, len(os.sched_getaffinity(0)))
