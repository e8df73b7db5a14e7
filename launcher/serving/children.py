"""Processes that end together: the HTTP process beside rank 0, the ranks, and whoever started them."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

from paceline.launcher.private_folder import PrivateFolder

DRAIN_SECONDS = 30.0
"""How long running requests may take once the server is told to end, unless told otherwise."""
STARTER_VARIABLE = "PACELINE_STARTER"
"""Names, for rank 0, the socket of the process that started the ranks."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals) -> None:
    """Have this process sent a signal when the one that started it ends, however it ends (prctl(2), Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


class DrainReceipt:
    """How whoever started the ranks learns that rank 0 ended well on a signal, which torchrun does not tell.

    A datagram to an abstract Unix socket (unix(7)): it waits in the kernel, and nothing is left in a file system.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = f"paceline-starter-{secrets.token_hex(16)}"
        self._socket.bind(f"\0{name}".encode())
        self._socket.setblocking(False)
        os.environ[STARTER_VARIABLE] = name

    def came(self) -> bool:
        """Whether rank 0 has called give_drain_receipt."""
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return False
        return True


def give_drain_receipt() -> None:
    """Tell whoever started the ranks, if anybody listens, that the signal it passed on was carried out."""
    name = os.environ.get(STARTER_VARIABLE)
    if name is not None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"\1", f"\0{name}".encode())


class Endpoint(PrivateFolder):
    """A ZeroMQ address that only this user can reach: a socket in a folder of its own. Who is connected stays so."""

    @property
    def address(self) -> str:
        """Where to bind and to connect."""
        return f"ipc://{self.path}/engine"


class Child:
    """A Python module run beside this process; it must end when its standard input does, and so never outlives us."""

    def __init__(self, module: str, settings: Mapping[str, Any], *, file_descriptors: tuple[int, ...]) -> None:
        """Start it; settings are the first line of its standard input, as JSON: what is secret shows in no listing."""
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            pass_fds=file_descriptors,
            # torchrun kills the whole group of a rank that does not end: this process is still to tell its clients.
            start_new_session=True,
        )
        stdin: IO[bytes] | None = self._process.stdin
        if stdin is None:
            raise OSError(f"{module} was started without its standard input")
        self._stdin = stdin
        self._stdin.write(json.dumps(settings).encode() + b"\n")
        self._stdin.flush()

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs. Costs a microsecond or two."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Let it end by itself for so long, then kill it."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()


def read_settings() -> dict[str, Any]:
    """What Child gave this process; the rest of standard input stays unread."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            raise EOFError("the process that was to give the settings has ended")
        line += piece
    settings: dict[str, Any] = json.loads(line)
    return settings


def wait_for_parent_end() -> None:
    """Return when the process that started this Child has ended."""
    while os.read(0, 4096):
        pass
