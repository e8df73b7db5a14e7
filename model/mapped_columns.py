"""Some columns of a stored matrix, copied out of a short-lived mapping of the file.

Each row's part is a run of few kilobytes. To read each by a system call from Python takes longer than to copy it, and
more so with several threads, which then take turns at the interpreter. Copied from mapped memory, the loop over rows
is native and threads do not wait for each other.
"""

from __future__ import annotations

import ctypes
import errno
import mmap

import numpy as np
import numpy.typing as npt

WINDOW_BYTES = 16 << 20
"""Of the file are mapped at a time and count as resident: a whole row at least."""
_MADV_POPULATE_READ = 22
"""Of Linux 5.14; the mmap module does not name it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def copy_mapped_columns(descriptor: int, first: int, pitch: int, out: npt.NDArray[np.uint8]) -> bool:
    """Fill out [rows, bytes of a row's part] from a file where parts begin `pitch` bytes apart, the first at `first`.

    False where the file cannot be mapped or its pages not be had: it has become too short, its storage fails, or its
    file system has no mappings. A read then says which. Before Linux 5.14 nobody tells beforehand that pages cannot be
    had, and the process ends by SIGBUS; so it does where a file is cut in the moment between that check and the copy.
    """
    step = max(1, WINDOW_BYTES // pitch)
    return all(
        _copy_window(descriptor, first + row * pitch, pitch, out[row : row + step]) for row in range(0, len(out), step)
    )


def _copy_window(descriptor: int, first: int, pitch: int, out: npt.NDArray[np.uint8]) -> bool:
    rows, width = out.shape
    skipped = first % mmap.ALLOCATIONGRANULARITY
    length = skipped + (rows - 1) * pitch + width
    try:
        mapping = mmap.mmap(descriptor, length, prot=mmap.PROT_READ, offset=first - skipped)
    except (OSError, ValueError):  # ValueError: longer than the file
        return False
    with mapping:
        parts = np.ndarray((rows, width), np.uint8, buffer=mapping, offset=skipped, strides=(pitch, 1))
        try:
            found = _populate(parts.__array_interface__["data"][0] - skipped, length)
            if found:
                np.copyto(out, parts)
        finally:
            del parts  # a mapping that is still seen cannot be closed
    return found


def _populate(address: int, length: int) -> bool:
    """Bring mapped pages in; False where some cannot be had. The system reads ahead meanwhile, whole rows.

    On one host other ranks need the other parts of these rows, and find them in the page cache.
    """
    # Not mapping.madvise, which would let no other thread run meanwhile.
    if _libc.madvise(address, length, _MADV_POPULATE_READ) == 0:
        return True
    return ctypes.get_errno() != errno.EFAULT  # others say that the system does not know this: the copy brings them in
