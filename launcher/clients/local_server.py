"""An engine of one's own: `serve`, started beside this process at a Unix socket that only this user can reach.

So a client has one way to an engine, HTTP, and what is checked, what is answered and how many ranks run is as with
any other server. The engine ends with this process, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import IO

from paceline.coordinator.errors import EngineError, InputError
from paceline.launcher.clients.address import Address
from paceline.launcher.private_folder import PrivateFolder
from paceline.launcher.serving.children import die_with_parent

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_END_SECONDS = 20.0
_LAST_LINES = 50
_BAD_INPUT = 2
"""Exit status of a start that a person can mend."""


class LocalServer:
    """A context in which the engine runs; `address` is where."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """arguments: those of `serve`, where it listens and how long it drains left out."""
        self._arguments = arguments
        self._folder: PrivateFolder | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        """What it said last on standard error."""
        self._reader: threading.Thread | None = None
        self._ready = False

    @property
    def address(self) -> Address:
        """Where requests go."""
        if self._folder is None:
            raise EngineError("the engine was not started")
        return Address("localhost", 80, False, unix_socket=f"{self._folder.path}/server")

    def __enter__(self) -> LocalServer:
        """Start it, and wait until it takes requests; what it says meanwhile is passed on to standard error.

        Raises InputError or EngineError where it does not come up.
        """
        self._folder = PrivateFolder()
        where = ["--uds", f"{self._folder.path}/server", "--drain-timeout", "0"]
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "paceline.launcher.start", "serve", *self._arguments, *where],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES},
                start_new_session=True,  # Ctrl-C in the terminal is for this process alone
                preexec_fn=_end_with_parent,
            )
            if process.stdout is None or process.stderr is None:
                raise OSError("the engine was started without its outputs")
            self._reader = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
            self._reader.start()
            line = process.stdout.readline()
            if not line:
                raise self.failure()
            self._ready = True
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def has_ended(self) -> bool:
        """Whether the engine is gone; `failure` then says why."""
        return self._process is None or self._process.poll() is not None

    def failure(self) -> EngineError | InputError:
        """Why it ended: its own last line. For when it does not answer any more."""
        if self._process is None or self._reader is None:
            return EngineError("the engine was not started")
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return EngineError("the engine does not answer")
        self._reader.join(_END_SECONDS)
        said = [line.removeprefix("paceline: ") for line in self._lines if line.startswith("paceline: ")]
        reason = said[-1] if said else f"the engine ended with exit status {status}"
        return InputError(reason) if status == _BAD_INPUT else EngineError(reason)

    def _read(self, stderr: IO[str]) -> None:
        """Keep its standard error from filling up. While it starts, pass on what it does; errors are for the caller."""
        with stderr:
            for line in stderr:
                text = line.rstrip("\n")
                if '"request_id"' in text:
                    continue  # its log of requests
                self._lines.append(text)
                shown = "" if self._ready else _for_a_person(text)
                if shown:
                    print(shown, file=sys.stderr, flush=True)

    def _end(self) -> None:
        try:
            self._end_process()
        finally:
            if self._folder is not None:
                self._folder.remove()

    def _end_process(self) -> None:
        process = self._process
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _for_a_person(line: str) -> str:
    """What a command says of the engine's line: nothing of its last words, and of a log line what is a sentence."""
    if line.startswith("paceline: "):
        return ""
    if not line.startswith("{"):
        return line
    event = str(json.loads(line)["event"])
    return f"paceline: {event}" if " " in event else ""


def _end_with_parent() -> None:
    """In the new process, before it becomes the engine's."""
    die_with_parent(signal.SIGTERM)
