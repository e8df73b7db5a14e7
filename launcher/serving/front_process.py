"""The HTTP process: uvicorn, the app and the tokenizer, beside the engine's rank 0, which starts it and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from paceline.coordinator.errors import InputError
from paceline.launcher.json_log import log_as_json
from paceline.launcher.open_files import allow_open_files
from paceline.launcher.serving.admission import Admission
from paceline.launcher.serving.app import create_app
from paceline.launcher.serving.children import read_settings, wait_for_parent_end
from paceline.launcher.serving.engine_link import LAST_WORDS_SECONDS, EngineLink
from paceline.launcher.serving.http_protocol import HttpProtocol
from paceline.launcher.serving.messages import FrontCut, FrontFailed, FrontReady
from paceline.launcher.serving.settings import ServerSettings
from paceline.launcher.tokenizer import Tokenizer

GARBAGE_THRESHOLD = 50_000
"""Objects made and not given back before Python looks for cycles among them."""


@dataclass(frozen=True, kw_only=True)
class FrontSettings:
    """What rank 0 tells the process that it starts."""

    address: str
    """Of the engine."""
    listener: int
    """File descriptor of the socket that clients connect to."""
    folder: str
    """The checkpoint's, for its tokenizer."""
    server: ServerSettings
    ssl_certfile: str | None
    ssl_keyfile: str | None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> FrontSettings:
        """From what rank 0 has passed as JSON; lists in it stand for tuples."""
        server: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values["server"].items()
        }
        return cls(**{**values, "server": ServerSettings(**server)})


def main() -> int:
    """Serve until the engine says that it is enough, or is gone; the exit status is 0 in the former case."""
    # Whoever is told to end tells this process, which has requests to finish first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_as_json()
    allow_open_files()
    settings = FrontSettings.from_json(read_settings())
    return uvloop.run(serve(settings))


async def serve(settings: FrontSettings) -> int:
    """Connect to the engine, load the tokenizer, and answer clients."""
    link = EngineLink(settings.address)
    _watch_parent(link)
    try:
        try:
            app = create_app(link, Tokenizer(Path(settings.folder)), settings.server)
            app.state.grammars.prepare()
        except InputError as error:
            link.send(FrontFailed(str(error)))
            return 1
        # What was loaded stays: garbage collection need not look through it again, which would stop all streams.
        gc.collect()
        gc.freeze()
        # A step's news of a thousand streams are that many objects and more, which are gone without it.
        gc.set_threshold(GARBAGE_THRESHOLD)
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            log_config=None,
            access_log=False,
            ws="none",
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
        server = _Server(config, lambda: link.send(FrontReady()))
        serving: asyncio.Future[Any] = asyncio.create_task(
            server.serve(sockets=[socket.socket(fileno=settings.listener)])
        )
        receiving = asyncio.create_task(link.receive())
        await asyncio.wait({serving, link.farewell}, return_when=asyncio.FIRST_COMPLETED)
        if link.farewell.done():
            link.send(FrontCut(await _drain(app.state.admission, link)))
        server.config.timeout_graceful_shutdown = LAST_WORDS_SECONDS
        server.should_exit = True
        await serving
        receiving.cancel()
        return 1 if link.failure is not None or not link.farewell.done() else 0
    finally:
        link.close()


async def _drain(admission: Admission, link: EngineLink) -> int:
    """Let accepted requests finish within their time, then cut them; who comes meanwhile is told to come back.

    Returns how many answers were cut.
    """
    admission.close()
    ends = {asyncio.create_task(admission.wait_idle()), asyncio.create_task(link.hurry.wait())}
    await asyncio.wait(ends, timeout=link.farewell.result(), return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    return admission.cut()


class _Server(uvicorn.Server):
    """uvicorn, with signals left to the engine's process, and a word when clients can connect."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _watch_parent(link: EngineLink) -> None:
    """End this process soon after the engine's, even if the event loop stands still."""
    loop = asyncio.get_running_loop()

    def watch() -> None:
        wait_for_parent_end()
        with contextlib.suppress(RuntimeError):  # the loop has ended, and this process with it
            loop.call_soon_threadsafe(link.fail, "the engine's process has ended")
        time.sleep(2 * LAST_WORDS_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
