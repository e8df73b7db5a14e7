"""Options that the clients share, and what they mean for where requests go."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.coordinator.errors import InputError
from paceline.launcher.clients.address import Address, api_key, parse_url
from paceline.launcher.clients.local_server import LocalServer
from paceline.launcher.options import ENGINE_OPTIONS, add_engine_options
from paceline.launcher.termination import ending_in_order


def add_server_options(parser: argparse.ArgumentParser, *, model_option: bool) -> None:
    """Add --url, --api-key and the options of an engine of one's own."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url", help="of an OpenAI-compatible server, as http://127.0.0.1:8000 (default: an own engine)"
    )
    group.add_argument("--api-key", metavar="KEY", help="the server's (default: the environment's OPENAI_API_KEY)")
    add_engine_options(parser, model_option=model_option)


class Backend:
    """Where requests go: a server somewhere, or an engine of one's own."""

    def __init__(self, address: Address, key: str | None, local: LocalServer | None) -> None:
        self.address = address
        self.key = key
        self.local = local


@contextmanager
def backend(arguments: argparse.Namespace, *extra: str) -> Iterator[Backend]:
    """The server of --url, or an engine that runs for as long as the context does; extra: arguments of `serve`.

    Raises InputError for options that do not go together, and what the engine's start raises.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("start this once, without torchrun: --tp N starts the ranks")
    try:
        import httptools  # noqa: F401
    except ImportError as error:
        raise InputError(f"this needs {error.name}; install paceline[serve]") from error
    own = _engine_arguments(arguments)
    if arguments.url is not None:
        if own:
            raise InputError(f"{own[0]} is for an own engine; it has no effect on the server of --url")
        yield Backend(parse_url(arguments.url), api_key(arguments.api_key), None)
        return
    if arguments.api_key is not None:
        raise InputError("--api-key is for the server of --url")
    model = [] if arguments.model is None else [arguments.model]
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending_in_order())
        local = stack.enter_context(LocalServer([*model, *own, *extra]))
        yield Backend(local.address, None, local)


def _engine_arguments(arguments: argparse.Namespace) -> list[str]:
    """The engine's options as they were given."""
    given = []
    if arguments.tensor_parallel_size is not None:
        given += ["--tp", str(arguments.tensor_parallel_size)]
    for option in ENGINE_OPTIONS:
        if hasattr(arguments, option.field):
            given.append(option.flag)
            if option.kind is not None:
                given.append(str(getattr(arguments, option.field)))
    return given
