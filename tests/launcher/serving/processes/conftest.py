"""`serve` as a person runs it, in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

PROMPT = [1, 2, 3]
PATIENCE = 60.0
"""Seconds after which something that should happen soon counts as not happening; half as long as a collective waits."""


class Server:
    """A `serve` command and all processes that it has started, found by a variable in their environment."""

    def __init__(self, *arguments: str, tp: int = 1) -> None:
        self._mark = f"PACELINE_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.launcher.start", "serve", *arguments, "--device", "cpu", "--tp", str(tp)],
            env={**os.environ, "OMP_NUM_THREADS": "1", name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = ""
        self.log: list[dict[str, Any]] = []
        """What was logged, once it has ended."""

    def wait_ready(self) -> Server:
        """Read the one line of standard output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("paceline: serving "), self.process.communicate()
        self.url = line.split()[-1]
        return self

    def processes(self) -> dict[int, str]:
        """Process ids with their command lines."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # ended meanwhile, or of another user
                continue
        return found

    def pid_of(self, part: str, rank: int | None = None) -> int:
        """The one process whose command line holds this part and, where one is given, whose environment this rank."""
        pids = [pid for pid, line in self.processes().items() if part in line]
        if rank is not None:
            pids = [
                pid for pid in pids if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ]
        (pid,) = pids
        return pid

    def end(self) -> tuple[int, str]:
        """Exit status and standard error without the log, once it has ended; by then no process is left."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.processes() == {}
        self.log = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
        return self.process.returncode, "\n".join(line for line in errors.splitlines() if not line.startswith("{"))

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):  # ended meanwhile, with one killed before it
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=PATIENCE)

    def get(self, path: str) -> httpx.Response:
        """The answer to a GET."""
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE)

    def complete(self, **fields: Any) -> dict[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=2 * PATIENCE)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    def ask_too_much(self) -> dict[str, Any] | None:
        """The answers to a request of far more than a minute's work; None where there were none."""
        body = {"prompt": [PROMPT] * 64, "n": 16, "max_tokens": 500, "ignore_eos": True}
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=2 * PATIENCE)
        except httpx.TransportError:
            return None
        return answer.json() if answer.is_success else None

    def wait_running(self) -> None:
        """Return once a request runs."""
        while self.get("/v1/load").json()["running"] == 0:
            time.sleep(0.02)

    def wait_draining(self) -> None:
        """Return once it takes no more requests."""
        while self.get("/ready").is_success:
            time.sleep(0.01)

    def stream(self, **fields: Any) -> tuple[int, list[dict[str, Any]]]:
        """Status and events of a streamed answer, which [DONE] ends."""
        body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=2 * PATIENCE)
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        if answer.status_code == 200:
            assert events.pop() == "[DONE]"
        return answer.status_code, [json.loads(event) for event in events]


Serve = Callable[..., Server]


@contextlib.contextmanager
def _serving(tiny: Callable[..., Any]) -> Iterator[Serve]:
    servers: list[Server] = []

    def start(*arguments: str, tp: int = 1, model: str | None = None, port: str = "0") -> Server:
        folder = str(tiny("llama").folder) if model is None else model
        servers.append(Server(folder, "--port", port, *arguments, tp=tp))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def serve(tiny: Callable[..., Any]) -> Iterator[Serve]:
    """serve(*arguments, tp=…): a server of a tiny model on a free port; what is left of it is killed in the end."""
    with _serving(tiny) as start:
        yield start


@pytest.fixture(scope="module")
def serve_all(tiny: Callable[..., Any]) -> Iterator[Serve]:
    """The same, for servers that the tests of a file share."""
    with _serving(tiny) as start:
        yield start
