"""Folders of sockets: what killed processes leave is removed, and nothing else."""

from __future__ import annotations

import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launcher.private_folder import PREFIX, PrivateFolder

HOLD = """
import socket
from paceline.launcher.private_folder import PrivateFolder
folder = PrivateFolder()
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(folder.path / "server"))
print(folder.path, flush=True)
input()
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path may have no more than 107 characters
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(folder)


def hold() -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder, and that."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_this_users_alone_and_gone_in_the_end(place: Path) -> None:
    with PrivateFolder() as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder.path / "s"))
        folder.remove()
    assert list(place.iterdir()) == []


def test_the_next_one_removes_what_a_killed_process_has_left(place: Path) -> None:
    killed, left = hold()
    living, kept = hold()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert {*place.iterdir()} == {left, kept}
    with PrivateFolder() as folder:
        assert {*place.iterdir()} == {folder.path, kept}
        assert (kept / "server").is_socket()
    living.kill()
    living.communicate()


def test_what_is_no_folder_of_sockets_stays(place: Path) -> None:
    (place / f"{PREFIX}notes").mkdir()
    (place / f"{PREFIX}notes" / "precious").write_text("x")
    (place / f"{PREFIX}file").write_text("x")
    (place / "elsewhere").mkdir()
    (place / f"{PREFIX}link").symlink_to(place / "elsewhere")
    before = {*place.rglob("*")}
    with PrivateFolder():
        assert before < {*place.rglob("*")}
    assert {*place.rglob("*")} == before
