"""The `serve` command: the engine on its ranks, and an HTTP process beside rank 0."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.coordinator.checks import check_number
from paceline.coordinator.config import EngineConfig
from paceline.coordinator.errors import EngineError, InputError
from paceline.launcher.checkpoint_source import resolve_checkpoint
from paceline.launcher.default_model import MODEL_NAME
from paceline.launcher.dialects.dialect import REASONING_PARSERS, TOOL_PARSERS
from paceline.launcher.json_log import log_as_json, log_event
from paceline.launcher.options import ENGINE_FLAGS, add_engine_options, engine_settings, errors_name_options
from paceline.launcher.sampling_defaults import read_sampling_defaults
from paceline.launcher.serving.children import DRAIN_SECONDS, Child, Endpoint, die_with_parent, give_drain_receipt
from paceline.launcher.termination import ending_in_order, signals_held

if TYPE_CHECKING:
    from paceline.launcher.serving.engine_loop import EngineLoop
    from paceline.launcher.serving.settings import ServerSettings

LOGGER = logging.getLogger("paceline.serving")

FRONT_MODULE = "paceline.launcher.serving.front_process"
SAME_SIGNAL_SECONDS = 0.5
"""A signal may come twice at once: from the terminal, and from whoever started the ranks."""
OVERDUE_SECONDS = 5.0
"""The HTTP process is given so much longer than it is told, to take leave of its clients."""
_SERVER_FLAGS = {
    "model_names": "--served-model-name",
    "max_queue": "--max-queue",
    "request_timeout": "--request-timeout",
    "otlp_endpoint": "--otlp-endpoint",
    "cors_origins": "--cors-origin",
    "allowed_hosts": "--allowed-host",
}
"""Options by the fields of ServerSettings that they set, where a value can be wrong."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the program's parser."""
    parser = commands.add_parser("serve", help="answer OpenAI's API over HTTP")
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder or Hugging Face id (default: {MODEL_NAME})")
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one (default 127.0.0.1)"
    )
    group.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default 8000)")
    group.add_argument("--uds", type=Path, metavar="PATH", help="listen on a Unix socket instead")
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what requests call the model; repeatable (default: MODEL, of a folder its last part)",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="keys, one a line, where # begins a comment line; each request must bear one of these or of "
        "PACELINE_API_KEYS",
    )
    group.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="PEM certificate: serve HTTPS")
    group.add_argument(
        "--ssl-keyfile", type=Path, metavar="FILE", help="the certificate's key, where it is not in its file"
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="pages of it (scheme://host[:port]) may call from a browser; repeatable; * is all",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="requests may name this host, beside localhost and --host; repeatable (default: any, but where --host is "
        "loopback and there are no keys)",
    )
    group.add_argument("--max-queue", type=int, metavar="N", help="most answers running and waiting (default 1024)")
    group.add_argument("--request-timeout", type=float, metavar="S", help="end a request after so many seconds")
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=DRAIN_SECONDS,
        metavar="S",
        help=f"on SIGTERM or Ctrl-C, let running requests go on for so long (default {DRAIN_SECONDS:g})",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send a trace of each request to this OpenTelemetry collector (OTLP, HTTP)",
    )
    group.add_argument(
        "--tool-parser",
        choices=TOOL_PARSERS,
        help="how the model writes calls of tools (default: as its template says)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        help="how it marks its reasoning (default: as its template says)",
    )
    group.add_argument(
        "--sampling-defaults",
        choices=("model", "openai"),
        default="model",
        help="what holds where a request names no temperature, top_p, top_k, min_p or repetition_penalty: the model's "
        "generation_config.json, then OpenAI's, or OpenAI's alone (default model)",
    )
    group.add_argument("--log-prompts", action="store_true", help="have prompts in the log")
    add_engine_options(parser, model_option=False)
    parser.set_defaults(run=run)


@errors_name_options(ENGINE_FLAGS | _SERVER_FLAGS)
def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal comes; on ranks other than 0 this ends the process when rank 0 is done.

    Raises InputError where the server cannot start as asked, EngineError where a rank or the HTTP process failed.
    """
    check_number("--drain-timeout", arguments.drain_timeout, 0, 86_400)
    tp = arguments.tensor_parallel_size
    config = EngineConfig(
        model=arguments.model or "",
        tensor_parallel_size=int(os.environ.get("WORLD_SIZE", "1")) if tp is None else tp,
        **engine_settings(arguments),
    )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A rank alone is whatever the person started, and may go on after its shell.
        die_with_parent(signal.SIGTERM)
    if int(os.environ.get("RANK", "0")) > 0:
        from paceline.launcher.engine import start_engine

        start_engine(config)  # and does not return
    _serve(arguments, config)


def _serve(arguments: argparse.Namespace, config: EngineConfig) -> None:
    """Rank 0's part. What a person may have got wrong is looked at first; then the HTTP process starts, which loads
    the tokenizer while the model is loaded here."""
    try:
        import zmq

        from paceline.launcher.serving.listener import check_certificate, listen, url_of
    except ImportError as error:
        raise InputError(f"serve needs {error.name}; install paceline[serve]") from error
    log_as_json()
    check_certificate(arguments.ssl_certfile, arguments.ssl_keyfile)
    server = _server_settings(arguments)
    if server.otlp_endpoint is not None:
        try:
            importlib.import_module("paceline.launcher.serving.tracing")
        except ImportError as error:
            raise InputError(f"--otlp-endpoint needs {error.name}; install paceline[trace]") from error
    folder = resolve_checkpoint(arguments.model)
    if arguments.sampling_defaults == "model":
        server = dataclasses.replace(server, sampling_defaults=read_sampling_defaults(folder))
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending_in_order())  # until the supervisor looks after signals
        with signals_held():  # what is made in the file system is not there before the stack knows of it
            listener = stack.enter_context(listen(arguments.host, arguments.port, arguments.uds))
            if arguments.uds is not None:
                stack.callback(arguments.uds.unlink, missing_ok=True)
            endpoint = stack.enter_context(Endpoint())
        url = url_of(listener, tls=arguments.ssl_certfile is not None)
        zmq_socket = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.DEALER))
        zmq_socket.linger = 1000
        zmq_socket.set_hwm(0)
        zmq_socket.bind(endpoint.address)
        front_settings = {
            "address": endpoint.address,
            "listener": listener.fileno(),
            "folder": str(folder),
            "server": dataclasses.asdict(server),
            "ssl_certfile": _text(arguments.ssl_certfile),
            "ssl_keyfile": _text(arguments.ssl_keyfile),
        }
        log_event(LOGGER, "starting", version=__version__, **dataclasses.asdict(config) | {"model": str(folder)})
        front = stack.enter_context(Child(FRONT_MODULE, front_settings, file_descriptors=(listener.fileno(),)))
        listener.close()

        with signals_held():
            from paceline.launcher.engine import start_engine
            from paceline.launcher.serving.engine_loop import EngineLoop

        engine = start_engine(dataclasses.replace(config, model=str(folder)))
        engine.prepare_grammars()
        loop = EngineLoop(engine, zmq_socket)

        def greet() -> None:
            print(f"paceline: serving {server.model_names[0]} at {url}", flush=True)
            facts = dataclasses.asdict(engine.limits) | {"sampling_defaults": server.sampling_defaults}
            log_event(LOGGER, "ready", url=url, model=server.model_names[0], **facts)

        supervisor = Supervisor(loop, front, endpoint, arguments.drain_timeout, greet)
        try:
            loop.run(until=supervisor.is_over)
        except EngineError as error:
            log_event(LOGGER, "engine_failed", logging.ERROR, error=str(error))
            engine.close(str(error))
            front.wait(OVERDUE_SECONDS)  # it tells its clients
            raise
        engine.close()
    log_event(LOGGER, "stopped", cut_answers=loop.cut_answers)
    if supervisor.second_signal is not None:
        raise SystemExit(128 + supervisor.second_signal)
    give_drain_receipt()


def _server_settings(arguments: argparse.Namespace) -> ServerSettings:
    from paceline.launcher.serving.hosts import hosts_to_allow
    from paceline.launcher.serving.listener import api_keys
    from paceline.launcher.serving.settings import ServerSettings

    name = arguments.model or MODEL_NAME
    if Path(name).expanduser().is_dir():
        name = Path(name).expanduser().resolve().name
    keys = api_keys(arguments.api_key_file, os.environ)
    bound = None if arguments.uds is not None else arguments.host
    given = {
        "max_queue": arguments.max_queue,
        "request_timeout": arguments.request_timeout,
        "otlp_endpoint": arguments.otlp_endpoint,
        "cors_origins": arguments.cors_origin and tuple(arguments.cors_origin),
        "api_keys": keys,
        "allowed_hosts": hosts_to_allow(bound, arguments.allowed_host or (), has_keys=bool(keys)),
        "tool_parser": arguments.tool_parser,
        "reasoning_parser": arguments.reasoning_parser,
    }
    return ServerSettings(
        model_names=tuple(arguments.served_model_name or [name]),
        log_prompts=arguments.log_prompts,
        **{field: value for field, value in given.items() if value is not None},
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else os.fspath(path)


class Supervisor:
    """Looks after what goes on beside the steps: the HTTP process, and signals that end the server.

    The first SIGTERM or SIGINT drains; another one, if it is no echo of the first, ends the server as soon as clients
    were told.
    """

    def __init__(
        self, loop: EngineLoop, front: Child, endpoint: Endpoint, drain_seconds: float, greet: Callable[[], None]
    ) -> None:
        """Signals are handled from here on; before, while the model is loaded, they end the process at once.

        greet is called once requests are taken.
        """
        self._loop = loop
        self._front = front
        self._endpoint = endpoint
        self._drain_seconds = drain_seconds
        self._greet: Callable[[], None] | None = greet
        self._asked_at: float | None = None
        self._told = False
        self.second_signal: int | None = None
        """Its number, once it has come."""
        self._hurried_at: float | None = None
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now > self._asked_at + SAME_SIGNAL_SECONDS:
            self.second_signal = number

    def is_over(self) -> bool:
        """Whether the server has ended as it was told to. For every turn of the engine's loop.

        Raises EngineError where the HTTP process has ended otherwise, or does not end in time on its own.
        """
        status = self._front.poll()
        if status is not None:
            self._loop.take_messages()  # its last ones: what it has cut, or why it failed
            if self.second_signal is not None or (self._told and status == 0):
                return True
            raise EngineError(f"the HTTP process ended unexpectedly ({_status_text(status)})")
        if self._greet is not None and self._loop.front_is_ready:
            self._greet()
            self._greet = None
            self._endpoint.remove()  # not left behind, however this process ends
        if self._asked_at is None:
            return False
        return self._is_drained(self._asked_at)

    def _is_drained(self, asked_at: float) -> bool:
        if not self._loop.front_is_ready:
            return True  # nobody was let in
        if not self._told:
            self._told = True
            log_event(LOGGER, "draining", seconds=self._drain_seconds)
            self._loop.drain(self._drain_seconds)
        if self.second_signal is not None:
            return self._is_hurried()
        if time.monotonic() > asked_at + self._drain_seconds + OVERDUE_SECONDS:
            raise EngineError(f"the HTTP process did not end {OVERDUE_SECONDS:g} s after --drain-timeout")
        return False

    def _is_hurried(self) -> bool:
        """Have the HTTP process tell its clients that they are cut off, and end; for a moment, it is waited for."""
        if self._hurried_at is None:
            self._hurried_at = time.monotonic()
            self._loop.drain(0)
        return time.monotonic() > self._hurried_at + OVERDUE_SECONDS


def _status_text(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
