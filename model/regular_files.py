"""Opening files of a checkpoint folder, where something else under a file's name would be waited for without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def check_is_regular(path: Path) -> None:
    """Raise OSError where the path, links followed, is a pipe, socket, device or folder, or nothing at all.

    To open a pipe waits until somebody writes to it, and a device may never end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def open_regular(path: Path) -> BinaryIO:
    """The file, open for reading; OSError as of check_is_regular, too."""
    check_is_regular(path)
    return path.open("rb")


def read_regular(path: Path) -> bytes:
    """The file's content; OSError as of open_regular."""
    with open_regular(path) as file:
        return file.read()
