"""Copies from pinned memory to a GPU, begun without giving the interpreter away.

torch gives it to other threads in each of its calls, and where several threads read files, to get it back takes ten
times as long as to begin a copy. Here a thread keeps it: the call takes a few microseconds. So the calls of several
threads do not wait for each other in the driver either.
"""

from __future__ import annotations

import ctypes

import torch

_HOST_TO_DEVICE = 1
"""cudaMemcpyHostToDevice."""


def pinned_copies_on(stream: torch.cuda.Stream) -> PinnedCopies | None:
    """Copies on a stream; None where torch has the CUDA runtime built in, so that nobody else can call it."""
    # It is found by torch's own dependencies. A PyDLL keeps the interpreter during calls, a CDLL does not.
    runtime = ctypes.PyDLL(torch._C.__file__)
    return PinnedCopies(runtime, stream) if hasattr(runtime, "cudaMemcpyAsync") else None


class PinnedCopies:
    """Begins copies on one stream; the caller keeps memory and event until they have ended."""

    def __init__(self, runtime: ctypes.PyDLL, stream: torch.cuda.Stream) -> None:
        self._copy, self._record = runtime.cudaMemcpyAsync, runtime.cudaEventRecord
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self._record.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._stream: int = stream.cuda_stream

    def start(self, destination: int, source: int, num_bytes: int, done: int) -> None:
        """Begin to copy bytes between two addresses, and record the event whose handle `done` is after them.

        The stream's device is the thread's current one. Raises torch.cuda.CudaError.
        """
        error = self._copy(destination, source, num_bytes, _HOST_TO_DEVICE, self._stream)
        error = error or self._record(done, self._stream)
        if error:
            raise torch.cuda.CudaError(error)
