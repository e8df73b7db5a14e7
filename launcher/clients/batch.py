"""The `batch` command: OpenAI's batch files, answered by an engine of one's own or by a server."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from paceline.coordinator.checks import check_integer
from paceline.coordinator.errors import EngineError, InputError
from paceline.launcher.clients.batch_files import Output, look_through, numbered_lines, open_output
from paceline.launcher.clients.batch_lines import BadLine, BatchRequest, bad_line, key_of, read_line, result_line
from paceline.launcher.clients.options import Backend, add_server_options, backend
from paceline.launcher.open_files import allow_open_files
from paceline.launcher.termination import ending_in_order, task_ending_in_order

if TYPE_CHECKING:
    from paceline.launcher.clients.http import HttpClient, Response

EXIT_LINES_FAILED = 1
_COME_BACK = (429, 503)
"""Statuses of a server that has no room now."""
_MOST_TRIES = 8
_MOST_WAIT_SECONDS = 30.0
_OWN_QUEUE = 65_536
"""Of an own engine: no line is to be refused for want of room, n answers and all."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the program's parser."""
    parser = commands.add_parser("batch", help="answer a file of requests (OpenAI's batch format)")
    parser.add_argument("input", type=Path, metavar="IN", help="JSON lines of custom_id, method, url, body")
    parser.add_argument(
        "output", type=Path, metavar="OUT", help="JSON lines of results; ids that it has are not run again"
    )
    parser.add_argument(
        "--concurrency", type=int, default=256, metavar="N", help="requests running at once (default 256)"
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what lines may call the model of an own engine; repeatable (default: as serve)",
    )
    add_server_options(parser, model_option=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Answer every line that has no result yet.

    Raises SystemExit (1 where a line failed, 143 after SIGTERM), InputError for files that cannot be used, EngineError
    where the engine or the server is gone: what was answered is kept, and another run goes on from there.
    """
    check_integer("--concurrency", arguments.concurrency, 1, 60_000)
    if arguments.url is not None and arguments.model is not None:
        raise InputError("--model is for an own engine; with --url each line's body names the model")
    if arguments.url is not None and arguments.served_model_name is not None:
        raise InputError("--served-model-name is for an own engine")
    total = look_through(arguments.input)
    allow_open_files()
    with open_output(arguments.output, arguments.input) as output:
        waiting = _waiting(arguments.input, output.done)
        first = next(waiting, None)
        if first is not None:
            names = [part for name in arguments.served_model_name or () for part in ("--served-model-name", name)]
            with ending_in_order(), backend(arguments, "--max-queue", str(_OWN_QUEUE), *names) as target:
                batch = Batch(target, output, total)
                try:
                    asyncio.run(batch.run(itertools.chain([first], waiting), arguments.concurrency))
                except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
                    _tell(f"what was answered is kept in {arguments.output}; the same command goes on from there")
                    raise
    _tell(f"{total} lines have their results in {arguments.output}, {output.failed} of them failed")
    if output.failed:
        raise SystemExit(EXIT_LINES_FAILED)


def _waiting(path: Path, done: set[int]) -> Iterator[BatchRequest | BadLine]:
    for number, data in numbered_lines(path):
        line = read_line(number, data)
        if key_of(line.custom_id, number) not in done:
            yield line


def _tell(words: str) -> None:
    print(f"paceline: {words}", file=sys.stderr, flush=True)


class Batch:
    """A run. Of the input no more is in memory than what runs."""

    def __init__(self, target: Backend, output: Output, total: int) -> None:
        """total: of the input's lines, those that have results included."""
        self._target = target
        self._output = output
        self._total = total
        self._tokens = 0

    async def run(self, lines: Iterator[BatchRequest | BadLine], concurrency: int) -> None:
        """Answer the lines, so many at once; results are written in the order in which they come."""
        from paceline.launcher.clients.http import HttpClient

        client = HttpClient(self._target.address, self._target.key)
        with (
            task_ending_in_order(),
            tqdm(
                total=self._total, initial=len(self._output.done), unit="line", disable=not sys.stderr.isatty()
            ) as bar,
        ):

            async def worker() -> None:
                for line in lines:
                    await self._answer(client, line)
                    bar.update()
                    seconds = bar.format_dict["elapsed"] or 1.0
                    bar.set_postfix_str(
                        f"{self._output.failed} failed, {self._tokens / seconds:.0f} tok/s", refresh=False
                    )

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(worker())
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                client.close()

    async def _answer(self, client: HttpClient, line: BatchRequest | BadLine) -> None:
        if isinstance(line, BadLine):
            self._output.add(bad_line(line), failed=True)
            return
        response = await self._ask(client, line)
        self._tokens += _output_tokens(response)
        self._output.add(result_line(line, response), failed=response.status != 200)

    async def _ask(self, client: HttpClient, line: BatchRequest) -> Response:
        """The server's answer; where it has no room or is gone for a moment, it is asked again, ever later.

        Raises EngineError where it stays away, InputError where it wants another key: no other line would do better.
        """
        from paceline.launcher.clients.http import TransportError
        from paceline.launcher.clients.server import refusal, unreachable

        wait = 0.5
        for attempt in range(1, _MOST_TRIES + 1):
            try:
                response = await client.post(line.url, line.body)
            except TransportError as error:
                if self._target.local is not None:
                    raise self._target.local.failure() from error
                # Who speaks no TLS, or has a certificate that is not trusted, would be no better next time.
                if attempt == _MOST_TRIES or isinstance(error.__cause__, ssl.SSLError):
                    raise unreachable(error, client.address) from error
            else:
                if response.status == 401:
                    raise refusal(response, client.address)
                if response.status not in _COME_BACK or attempt == _MOST_TRIES:
                    break
                if self._target.local is not None and response.error_fields()[2] == "engine_failed":
                    raise self._target.local.failure()
                wait = max(wait, _seconds(response.headers.get("retry-after", "")))
            await asyncio.sleep(min(wait, _MOST_WAIT_SECONDS))
            wait *= 2
        if response.status == 503:
            raise EngineError(f"{client.address} answered 503 {_MOST_TRIES} times: {response.error_fields()[0]}")
        return response


def _seconds(retry_after: str) -> float:
    """Of a Retry-After header; a date counts as nothing."""
    return float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0


def _output_tokens(response: Response) -> int:
    """As the usage of an answer has them; 0 where there is none."""
    try:
        tokens = response.json()["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        return 0
    return tokens if isinstance(tokens, int) else 0
