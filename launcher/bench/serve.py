"""The `bench serve` command: load against any OpenAI-compatible server, and what it makes of it."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from paceline.coordinator.checks import check_integer, check_number
from paceline.coordinator.errors import EngineError, InputError
from paceline.launcher.bench.plan import Lengths, PlannedRequest, poisson_arrivals, random_requests, trace_requests
from paceline.launcher.bench.statistics import SLO_NAMES, summarise
from paceline.launcher.clients.address import api_key, parse_url
from paceline.launcher.open_files import allow_open_files

if TYPE_CHECKING:
    from paceline.launcher.bench.load import Load
    from paceline.launcher.bench.report import Report
    from paceline.launcher.bench.target import Target

EXIT_INTERRUPTED = 130
_UNITS = {"ms": 0.001, "s": 1.0}
_WARMUP_AT_ONCE = 8


def add_parser(commands: argparse._SubParsersAction[Any], parser_class: type[argparse.ArgumentParser]) -> None:
    """Add `bench` and what can be measured to the program's parser."""
    bench = commands.add_parser("bench", help="measure a server")
    kinds = bench.add_subparsers(dest="kind", metavar="serve", required=True, parser_class=parser_class)
    parser = kinds.add_parser("serve", help="load against an OpenAI-compatible server")
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="(default http://127.0.0.1:8000)")
    server.add_argument("--model", metavar="NAME", help="as the server calls it (default: the first that it lists)")
    server.add_argument("--api-key", metavar="KEY", help="(default: the environment's OPENAI_API_KEY)")
    server.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="token ids, or a user's message"
    )
    server.add_argument(
        "--tokenizer", metavar="MODEL", help="folder or Hugging Face id, for servers that have no /tokenize"
    )
    load = parser.add_argument_group("load")
    kind = load.add_mutually_exclusive_group(required=True)
    kind.add_argument("--rate", type=float, metavar="R", help="requests a second, at times drawn at random (Poisson)")
    kind.add_argument("--concurrency", type=int, metavar="N", help="keep N requests running")
    kind.add_argument("--scale", type=float, metavar="S", help="the times of --trace, S times as many a second")
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="lengths and shared prefixes of an Azure or Mooncake trace"
    )
    load.add_argument(
        "--requests", type=int, metavar="N", help="at most so many (default 100 without --trace, --duration)"
    )
    load.add_argument("--duration", type=float, metavar="S", help="send for so many seconds, then wait for the answers")
    load.add_argument(
        "--prompt-tokens", type=lengths, default=Lengths(512, 512), metavar="N[:M]", help="or from N to M (default 512)"
    )
    load.add_argument(
        "--output-tokens", type=lengths, default=Lengths(128, 128), metavar="N[:M]", help="or from N to M (default 128)"
    )
    load.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of all requests (default 0)")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed makes the same load (default 0)")
    load.add_argument("--warmup", type=int, default=0, metavar="N", help="requests before, which are not counted")
    load.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="give a request up after so long (default 600)",
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "--slo", type=slo, action="append", default=[], metavar="NAME=TIME", help="ttft, itl or e2e=500ms; repeatable"
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="keep all figures, and one row a request")
    result.add_argument("--plot", type=Path, metavar="FILE", help="draw them: .png, .svg or .pdf")
    parser.set_defaults(run=run)


def lengths(text: str) -> Lengths:
    """N or N:M of --prompt-tokens and --output-tokens."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})(?::([1-9][0-9]{0,8}))?", text)
    if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
        raise argparse.ArgumentTypeError(f"must be like 512, or 100:1024 for all lengths between, got {text!r}")
    return Lengths(int(found[1]), int(found[2] or found[1]))


def slo(text: str) -> tuple[str, float]:
    """NAME=TIME of --slo; the time in seconds."""
    found = re.fullmatch(rf"({'|'.join(SLO_NAMES)})=([0-9]+(?:\.[0-9]+)?)(ms|s)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be like ttft=500ms ({', '.join(SLO_NAMES)}; ms or s), got {text!r}")
    return found[1], float(found[2]) * _UNITS[found[3]]


def run(arguments: argparse.Namespace) -> None:
    """Load the server, and print what was measured, after Ctrl-C too.

    Raises InputError or EngineError where the load cannot be begun, EngineError where a request failed, and SystemExit
    (130) after Ctrl-C.
    """
    _check(arguments)
    try:
        import uvloop

        from paceline.launcher.clients.http import HttpClient
    except ImportError as error:
        raise InputError(f"bench serve needs {error.name}; install paceline[serve]") from error
    from paceline.launcher.bench.load import Load
    from paceline.launcher.bench.target import find_target

    allow_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        client = HttpClient(parse_url(arguments.url), api_key(arguments.api_key))
        target = runner.run(
            find_target(
                client,
                model=arguments.model,
                endpoint=arguments.endpoint,
                tokenizer=arguments.tokenizer,
                seed=arguments.seed,
                temperature=arguments.temperature,
            )
        )
        _check_lengths(arguments, target)
        runner.run(_warm_up(target, arguments))
        load = Load(target, request_timeout=arguments.request_timeout)
        interrupted = False
        try:
            runner.run(_watched(load, arguments))
        except KeyboardInterrupt:
            interrupted = True
        client.close()
    report = _report(arguments, target, load, interrupted)
    _publish(arguments, report, load)
    if interrupted:
        raise SystemExit(EXIT_INTERRUPTED)
    errors = [record.error for record in load.records if record.error is not None]
    if errors:
        raise EngineError(
            f"{len(errors)} of {report.figures.sent} requests failed, the first of them with: {errors[0]}"
        )


def _check(arguments: argparse.Namespace) -> None:
    """Raise InputError for what cannot be carried out, before anything is."""
    for name, low in (("rate", 0), ("scale", 0), ("duration", 0), ("request_timeout", 0)):
        if getattr(arguments, name) is not None:
            check_number(f"--{name.replace('_', '-')}", getattr(arguments, name), low, 10**6, above_low=True)
    check_number("--temperature", arguments.temperature, 0, 100)
    for name, low, high in (("concurrency", 1, 60_000), ("requests", 1, 10**8), ("warmup", 0, 10**6)):
        if getattr(arguments, name) is not None:
            check_integer(f"--{name}", getattr(arguments, name), low, high)
    if arguments.scale is not None and arguments.trace is None:
        raise InputError("--scale needs --trace, whose times it changes")
    if arguments.rate is not None and arguments.trace is not None:
        raise InputError("--trace has times of its own: give --scale (1 is as recorded) or --concurrency, not --rate")
    for path in (arguments.json, arguments.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"there is no folder {path.absolute().parent} to write {path.name} to")
    if arguments.plot is not None:
        from paceline.launcher.bench.plot import check_plot

        check_plot(arguments.plot)
    if arguments.trace is None and arguments.duration is None and arguments.requests is None:
        arguments.requests = 100


def _check_lengths(arguments: argparse.Namespace, target: Target) -> None:
    """A trace's longest requests are left out; lengths that a person gives are to be possible."""
    longest = arguments.prompt_tokens.high + arguments.output_tokens.high
    if arguments.trace is None and target.max_model_len is not None and longest > target.max_model_len:
        raise InputError(
            f"--prompt-tokens and --output-tokens make requests of {longest} tokens, "
            f"and the model takes {target.max_model_len}; ask for shorter ones"
        )


def _plans(arguments: argparse.Namespace) -> Iterator[PlannedRequest]:
    """The load, at most --requests of it."""
    return itertools.islice(_all_plans(arguments), arguments.requests)


def _all_plans(arguments: argparse.Namespace) -> Iterator[PlannedRequest]:
    shapes = (arguments.prompt_tokens, arguments.output_tokens, arguments.seed)
    if arguments.rate is not None:
        return poisson_arrivals(arguments.rate, *shapes, duration=arguments.duration)
    if arguments.trace is None:
        return random_requests(*shapes)
    if arguments.scale is not None:
        return trace_requests(arguments.trace, arguments.scale, duration=arguments.duration)
    return trace_requests(arguments.trace, 1.0, duration=None)


async def _warm_up(target: Target, arguments: argparse.Namespace) -> None:
    """Requests of the same kind as the load's, whose prompts are other ones: nothing of the load is cached before."""
    from paceline.launcher.bench.load import Load

    if arguments.warmup == 0:
        return
    drawn = itertools.islice(_plans(arguments), arguments.warmup)
    plans = [
        PlannedRequest(-2 - place, 0.0, plan.prompt_tokens, plan.output_tokens)
        for place, plan in enumerate(drawn)
        if target.fits(plan)
    ]
    load = Load(target, request_timeout=arguments.request_timeout)
    await load.run_in_turn(plans, _WARMUP_AT_ONCE)
    for record in load.records:
        if record.error is not None:
            raise InputError(f"a warm-up request failed: {record.error}")


async def _watched(load: Load, arguments: argparse.Namespace) -> None:
    """The run, with a line of progress on a terminal."""
    plans = _plans(arguments)
    if arguments.concurrency is None:
        running = asyncio.create_task(load.run_when_due(plans))
    else:
        running = asyncio.create_task(load.run_in_turn(plans, arguments.concurrency, duration=arguments.duration))
    with tqdm(unit="request", disable=not sys.stderr.isatty()) as bar:
        try:
            while not running.done():
                await asyncio.wait([running], timeout=None if bar.disable else 0.5)
                if not bar.disable:
                    sent = sum(record.sent is not None for record in load.records)
                    bar.n = sum(record.ended is not None for record in load.records)
                    bar.total = len(load.records)
                    bar.set_postfix_str(f"{sent - bar.n} running")
        finally:
            running.cancel()
            await asyncio.wait([running])
    running.result()


def _report(arguments: argparse.Namespace, target: Target, load: Load, interrupted: bool) -> Report:
    from paceline.launcher.bench.report import Report
    from paceline.launcher.bench.target import WISHES

    limits = dict(arguments.slo)
    open_loop = arguments.concurrency is None
    kind = f"{arguments.concurrency} at a time"
    if arguments.rate is not None:
        kind = f"{arguments.rate:g} requests/s (Poisson)"
    elif arguments.scale is not None:
        kind = f"{arguments.trace.name} at scale {arguments.scale:g}"
    hidden = {"api_key", "run", "command", "kind", "json", "plot", "slo"}
    settings = {name: _plain(value) for name, value in vars(arguments).items() if name not in hidden}
    return Report(
        title=f"{target.model} at {target.client.address}{target.path}: {kind}, seed {arguments.seed}",
        settings={**settings, "model": target.model, "url": str(target.client.address)},
        figures=summarise(load.records, limits, open_loop=open_loop),
        slo=limits,
        left_out=load.left_out,
        max_model_len=target.max_model_len,
        refused_fields=[wish for wish in WISHES if wish not in target.wishes],
        cpu_seconds=load.cpu_seconds,
        interrupted=interrupted,
        # A chat template begins all prompts alike.
        unlike_prompts=arguments.endpoint == "completions"
        and all(record.plan.block_ids is None for record in load.records),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Lengths):
        return [value.low, value.high]
    return value.name if isinstance(value, Path) else value


def _publish(arguments: argparse.Namespace, report: Report, load: Load) -> None:
    print("\n".join(report.lines()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.as_json(load.records)) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        from paceline.launcher.bench.plot import draw

        draw(report.title, load.records, report.slo, arguments.plot)
