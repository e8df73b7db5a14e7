"""Host memory that the pieces of a checkpoint pass through on their way to parameters."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import torch

READERS = 8
SPARE_BUFFERS = 4
"""Beyond one for each reader: what is being copied to a GPU meanwhile."""
PIECE_BYTES = 4 << 20
"""All buffers together are to stay in the processor's cache, from which a GPU then takes them, and not from memory."""
_ALIGNMENT = 256
"""Of a buffer's size, so that it can hold elements of any type."""

Buffer = Future[torch.Tensor]
"""Memory for one piece, uint8; to ask for it waits until it is there."""


class StagingMemory:
    """Buffers that the readers share, each an allocation of its own, pinned where the device is a GPU.

    To pin memory takes tens of milliseconds for all of them. So it is begun here, for pieces of the usual size, in a
    thread of its own; one by one, so that readers start as soon as there is one, and since torch rounds what it pins
    up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._usual_bytes = PIECE_BYTES
        self._usual = self._begin(self._usual_bytes)

    def buffers(self, size: int) -> list[Buffer]:
        """One for each of num_readers() readers and SPARE_BUFFERS, each of at least that size in bytes.

        RuntimeError from each, where the system does not give the memory.
        """
        return self._usual if size <= self._usual_bytes else self._begin(size)

    def _begin(self, size: int) -> list[Buffer]:
        pool = ThreadPoolExecutor(1, thread_name_prefix="pin-memory")
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        buffers = [pool.submit(self._allocate, size) for _ in range(num_readers() + SPARE_BUFFERS)]
        pool.shutdown(wait=False)
        return buffers

    def _allocate(self, size: int) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        with torch.cuda.device(self._device):  # another thread's choice does not count here
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def num_readers() -> int:
    """Threads that read at the same time: one a processor, up to READERS."""
    return min(READERS, len(os.sched_getaffinity(0)))
