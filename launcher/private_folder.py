"""Folders for Unix sockets that nobody but this user is to reach."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "paceline-sockets-"


class PrivateFolder:
    """A folder of this process's own, for sockets. First, those that killed processes have left are removed.

    A process holds a lock on its folder (flock(2)), which ends when it does, however that is.
    """

    def __init__(self) -> None:
        _sweep()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
            lock = _try_lock(self.path)
            if lock is not None:
                break  # otherwise another process's sweep was faster than the lock, and has removed it
        self._lock: int | None = lock

    def remove(self) -> None:
        """Take it out of the file system, with its sockets. May be called again."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _sweep() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = _try_lock(path)
        if lock is not None:
            _remove(path)
            os.close(lock)


def _try_lock(path: Path) -> int | None:
    """The file descriptor that holds the lock; None where it is not this user's folder, or is held by somebody."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(folder).st_uid == os.geteuid():
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(folder), path.stat()):
                return folder
    except OSError:  # held, or gone
        pass
    os.close(folder)
    return None


def _remove(path: Path) -> None:
    """Remove a folder of sockets; one that holds anything else is nobody's to remove."""
    with contextlib.suppress(OSError):
        for each in path.iterdir():
            if stat.S_ISSOCK(each.lstat().st_mode):
                each.unlink()
        path.rmdir()
