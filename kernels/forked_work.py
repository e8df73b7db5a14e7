"""Work that forked processes do for what it leaves on disk: Python's threads would do one piece at a time."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

_PATIENCE_S = 60.0
"""How long no piece may end before it is given up: a thread of this process may have held a lock as it was forked."""
_INDEX_BYTES = 2
_PR_SET_PDEATHSIG = 1


@contextmanager
def forked(pieces: Sequence[Callable[[], object]], num_processes: int) -> Iterator[Iterator[int]]:
    """Do pieces of work, at most 2,000, in so many processes; within, the indices of those that are done, as they end.

    The processes take the pieces in turn, in their order. There is no index for a piece that raised an exception, or
    whose process died: whoever forked does it again, and has its error. The processes have this one's threads' locks
    as they are, so a piece may take none that another thread may hold; and they end with this block at the latest.
    """
    queue, to_queue = os.pipe()
    done, to_done = os.pipe()
    # A read from a pipe is one step, and takes a whole index, since there are only such.
    os.write(to_queue, b"".join(index.to_bytes(_INDEX_BYTES, "big") for index in range(len(pieces))))
    os.close(to_queue)
    processes: list[int] = []
    try:
        try:
            for _ in range(num_processes):
                with suppress(OSError):  # no memory or no process is left: those there are do it, or whoever forked
                    processes.append(_fork(lambda: _do(pieces, queue, to_done)))
        finally:
            os.close(to_done)
        yield _indices(done)
    finally:
        while os.read(queue, select.PIPE_BUF):  # a process whose id an interrupt has lost finds nothing more to do
            pass
        for process in processes:
            with suppress(ProcessLookupError, ChildProcessError):  # who ignores SIGCHLD has none to wait for
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        os.close(queue)
        os.close(done)


def _indices(done: int) -> Iterator[int]:
    """What the processes write, until the last of them has ended."""
    poll = select.poll()
    poll.register(done, select.POLLIN)
    while poll.poll(_PATIENCE_S * 1000) and (index := os.read(done, _INDEX_BYTES)):
        yield int.from_bytes(index, "big")


def _do(pieces: Sequence[Callable[[], object]], queue: int, to_done: int) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)  # what is wrong is said where the piece is done again
    while index := os.read(queue, _INDEX_BYTES):
        try:
            pieces[int.from_bytes(index, "big")]()
        except Exception:  # met again by whoever does the piece again
            continue
        os.write(to_done, index)


def _fork(work: Callable[[], None]) -> int:
    """A process that does work and ends, by default on any signal, and with this one; returns its id."""
    parent = os.getpid()
    libc = ctypes.CDLL(None)
    # No signal comes to the process before it has left behind how this one handles it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, that locks are as they are
            process = os.fork()
        if process == 0:
            try:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                for number in signal.valid_signals():
                    if callable(signal.getsignal(number)):
                        signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                if os.getppid() == parent:
                    work()
            finally:
                os._exit(0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return process
