"""Pieces of work in forked processes: what is done, and what becomes of processes that die, hang or are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.kernels import forked_work
from paceline.kernels.forked_work import forked

ENDLESS_S = 60


def writing(path: Path) -> Callable[[], object]:
    """A piece that leaves the id of its process."""
    return lambda: path.write_text(str(os.getpid()))


def failing() -> None:
    raise ValueError("no")


def waiting() -> None:
    time.sleep(ENDLESS_S)


def is_there(process: int) -> bool:
    """Whether a process runs still."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_piece_is_done_by_another_process(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(20)]
    with forked([writing(path) for path in paths], 3) as done:
        assert sorted(done) == list(range(20))
    processes = {int(path.read_text()) for path in paths}
    assert os.getpid() not in processes
    assert not any(is_there(process) for process in processes)


def test_pieces_that_fail_are_not_done_and_the_others_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def say_and_die() -> None:
        os.write(2, b"no")
        os.kill(os.getpid(), signal.SIGKILL)

    pieces = [failing, say_and_die, writing(tmp_path / "a"), failing, writing(tmp_path / "b")]
    with forked(pieces, 2) as done:
        assert sorted(done) == [2, 4]
    assert capfd.readouterr() == ("", "")


def test_where_all_processes_die_the_rest_is_not_done(tmp_path: Path) -> None:
    with forked([lambda: os._exit(1), lambda: os._exit(1), writing(tmp_path / "a")], 2) as done:
        assert list(done) == []


def test_processes_do_not_outlive_the_block(tmp_path: Path) -> None:
    def write_and_wait() -> None:
        os.write(to_here, str(os.getpid()).encode())
        waiting()

    here, to_here = os.pipe()
    with pytest.raises(KeyboardInterrupt), forked([write_and_wait], 1):
        process = int(os.read(here, 20))
        raise KeyboardInterrupt
    assert not is_there(process)


def test_processes_that_hang_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_work, "_PATIENCE_S", 0.5)
    with forked([writing(tmp_path / "a"), waiting], 1) as done:
        assert list(done) == [0]


def test_a_signal_is_not_handled_as_in_the_process_that_forked(tmp_path: Path) -> None:
    def raise_signal() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        waiting()

    before = signal.signal(signal.SIGTERM, lambda *_: (tmp_path / "handled").touch())
    try:
        with forked([raise_signal], 1) as done:
            assert list(done) == []
        assert not (tmp_path / "handled").exists()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nobody_is_warned_of_threads(tmp_path: Path) -> None:
    """Python 3.12 warns who forks where there are threads."""
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with forked([writing(tmp_path / "a")], 1) as done:
                assert list(done) == [0]
        assert seen == []
    finally:
        ends.set()
        thread.join()


ORPHAN = """
import os, time
from paceline.kernels.forked_work import forked

def work():
    os.write(1, b"")
    os.write(to_here, b"x")
    time.sleep(60)

here, to_here = os.pipe()
with forked([work], 1):
    os.read(here, 1)
    print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
    time.sleep(60)
"""


def test_processes_die_with_the_one_that_forked_them() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_there(child)
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + ENDLESS_S / 2
    while is_there(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_there(child)
