"""Some columns of a stored matrix, copied out of a mapping of the whole file.

Each row's part is a run of few kilobytes. To read each by a system call from Python takes longer than to copy it, and
more so with several threads, which then take turns at the interpreter. Copied from mapped memory, the loop over rows
is native and threads do not wait for each other. The mapping begins with the first columns and stays while files are
open, since to map or to unmap waits until no thread of the process brings pages in, keeps those from it that follow,
and in Python 3.11 keeps the interpreter from all; the pages that are resident come and go.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading

import numpy as np
import numpy.typing as npt

WINDOW_BYTES = 16 << 20
"""Of the file are resident at a time for each copy: a whole row at least."""
_MADV_POPULATE_READ = 22
"""Of Linux 5.14; the mmap module does not name it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedFile:
    """An open file that is mapped as soon as it is asked for; a context that ends with its mapping."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None
        self._address = 0
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._mapping is not None:
            self._mapping.close()

    def copy_columns(self, first: int, pitch: int, out: npt.NDArray[np.uint8]) -> bool:
        """Fill out [rows, bytes of a row's part] from where parts begin `pitch` bytes apart, the first at `first`.

        False where the file could not be mapped or its pages not be had: it has become too short, its storage fails,
        or its file system has no mappings. A read then says which. What is missing of a file's last page alone reads as
        zeros, so whoever copies looks at the file's size afterwards. Before Linux 5.14 nobody tells beforehand that
        pages cannot be had, and the process ends by SIGBUS; so it does where a file is cut in the moment between that
        check and the copy. Several threads may copy at a time.
        """
        mapping = self._map()
        if mapping is None or first + (len(out) - 1) * pitch + out.shape[1] > len(mapping):
            return False
        step = max(1, WINDOW_BYTES // pitch)
        return all(
            self._copy_window(mapping, first + row * pitch, pitch, out[row : row + step])
            for row in range(0, len(out), step)
        )

    def _map(self) -> mmap.mmap | None:
        with self._one_at_a_time:
            if self._mapping is None:
                try:
                    self._mapping = mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
                except (OSError, ValueError):  # ValueError: the file is empty
                    return None
                self._address = np.frombuffer(self._mapping, np.uint8).ctypes.data
            return self._mapping

    def _copy_window(self, mapping: mmap.mmap, first: int, pitch: int, out: npt.NDArray[np.uint8]) -> bool:
        start = first - first % mmap.PAGESIZE
        pages = (self._address + start, first + (len(out) - 1) * pitch + out.shape[1] - start)
        found = _populate(*pages)
        if found:
            # A view that outlives the copy would keep the mapping from being closed.
            np.copyto(out, np.ndarray(out.shape, np.uint8, buffer=mapping, offset=first, strides=(pitch, 1)))
        _libc.madvise(*pages, mmap.MADV_DONTNEED)  # no longer resident; in the page cache they stay
        return found


def _populate(address: int, length: int) -> bool:
    """Bring mapped pages in; False where some cannot be had. The system reads ahead meanwhile, whole rows.

    On one host other ranks need the other parts of these rows, and find them in the page cache.
    """
    # Not mapping.madvise, which would let no other thread run meanwhile.
    if _libc.madvise(address, length, _MADV_POPULATE_READ) == 0:
        return True
    return ctypes.get_errno() != errno.EFAULT  # others say that the system does not know this: the copy brings them in
