"""The two files of a batch: the input is looked through before anything runs, the output is what a run goes on from."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.coordinator.errors import InputError
from paceline.launcher.clients.batch_lines import key_of, read_line, read_result

_CHUNK = 1 << 16
_MOST_SHOWN = 5


@dataclass(slots=True)
class Output:
    """The results so far."""

    file: IO[bytes]
    done: set[int]
    """Keys of the lines that have one."""
    failed: int
    """How many of them failed."""

    def add(self, data: bytes, *, failed: bool) -> None:
        """Add a whole line. Raises OSError where there is no room for it."""
        if self.file.write(data) != len(data):
            raise OSError("the results could not be written whole: is the disk full?")
        self.failed += failed


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of the input that hold something, and their numbers from 1."""
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if data.strip():
                yield number, data


def look_through(path: Path) -> int:
    """How many lines the input has, blank ones not counted. Keeps about 100 bytes for each.

    Raises InputError where it cannot be read or an id stands on two lines, for then nobody could tell their results
    apart.
    """
    seen: dict[int, int] = {}
    twice: list[str] = []
    try:
        for number, data in numbered_lines(path):
            line = read_line(number, data)
            key = key_of(line.custom_id, number)
            if key in seen:
                twice.append(f"{line.custom_id!r} on lines {seen[key]} and {number}")
            else:
                seen[key] = number
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})") from error
    if twice:
        more = f" and {len(twice) - _MOST_SHOWN} more" if len(twice) > _MOST_SHOWN else ""
        raise InputError(f"{path}: each custom_id may be used once: {', '.join(twice[:_MOST_SHOWN])}{more}")
    return len(seen)


@contextmanager
def open_output(path: Path, source: Path) -> Iterator[Output]:
    """The output, to add lines to, and what it has already.

    A last line that was half written when a run was killed is taken away, or ended where only its line break is
    missing. A run that fails before it has a result leaves no new file. Raises InputError where the file is something
    else, or another run writes to it.
    """
    if path.exists() and source.exists() and os.path.samefile(path, source):
        raise InputError(f"{path} is the input; name another file for the results")
    is_new = not os.path.lexists(path)
    try:
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror or error})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise FileNotFoundError  # another run has just failed, and its file is gone
        except (BlockingIOError, FileNotFoundError) as error:
            raise InputError(f"{path} is being written by another run") from error
        _repair_end(file)
        file.seek(0)
        done, failed = set(), 0
        with path.open("rb") as results:
            for number, data in enumerate(results, 1):
                try:
                    key, has_failed = read_result(data)
                except ValueError as error:
                    raise InputError(
                        f"{path} line {number} is no result of a batch ({error}); name another file for the results"
                    ) from error
                done.add(key)
                failed += has_failed
        try:
            yield Output(file, done, failed)
        except BaseException:
            if is_new and os.fstat(file.fileno()).st_size == 0:
                path.unlink(missing_ok=True)
            raise


def _repair_end(file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    tail = b""
    start = size
    while start > 0 and b"\n" not in tail:
        start = max(0, start - _CHUNK)
        file.seek(start)
        tail = file.read(min(_CHUNK, size - start)) + tail
    rest = tail.rpartition(b"\n")[2]
    if not rest:
        return
    try:
        read_result(rest)
    except ValueError:
        if not rest.startswith(b"{"):
            return  # not of ours; it is refused when it is read
        file.truncate(size - len(rest))
    else:
        file.write(b"\n")
