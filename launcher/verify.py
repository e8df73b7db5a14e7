"""The `verify` command: show that a model's shards are its checkpoint, or what they would be."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.coordinator.config import DTYPES, EngineConfig
from paceline.coordinator.errors import EngineError, InputError
from paceline.launcher.checkpoint_source import resolve_checkpoint
from paceline.launcher.tp_range import parse_tp_range

if TYPE_CHECKING:
    from paceline.worker.ranks import RankGroup
    from paceline.worker.verification import ShardReport

PLANNED_TP = "1,2,4,8"


class VerificationFailed(EngineError):
    """Shards that are not the checkpoint."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the program's parser."""
    parser = commands.add_parser("verify", help="check a model's shards against its checkpoint, bit for bit")
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or Hugging Face id (default: the default model)"
    )
    parser.add_argument(
        "--tp",
        "--tensor-parallel-size",
        dest="tp",
        metavar="N",
        help="ranks, one process each (default 1); 1..8 or 1,2,4 tries each in turn in one process, without GPUs",
    )
    parser.add_argument("--config-only", action="store_true", help="show plan and memory from config.json, no weights")
    parser.add_argument("--no-forward", action="store_true", help="no forward pass; it needs all weights on one rank")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the shards; auto is the checkpoint's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where --tp N holds the shards")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw which rank holds what, as PNG, SVG or PDF")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Verify, and show on rank 0 what was found; VerificationFailed on every rank where anything differs."""
    if arguments.plot is not None:
        from paceline.launcher.verify_plot import check_plot

        check_plot(arguments.plot)
    if arguments.config_only:
        if int(os.environ.get("RANK", "0")) == 0:  # one rank is enough to read a config
            _plan(arguments)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1 or arguments.device == "cuda":
        _verify_as_rank(arguments)
    else:
        _verify_alone(arguments)


def _plan(arguments: argparse.Namespace) -> None:
    """The plan alone, from config.json."""
    from paceline.worker.verification import ShardVerifier

    numbers = parse_tp_range(arguments.tp or PLANNED_TP)
    folder = resolve_checkpoint(arguments.model, weights=False)
    with _input_errors():
        verifier = ShardVerifier(folder, arguments.dtype)
        reports = [verifier.plan(tp) for tp in numbers]
    _show(arguments, folder, reports)


def _verify_alone(arguments: argparse.Namespace) -> None:
    """One process that stands for all ranks."""
    from paceline.worker.verification import ShardVerifier

    numbers = parse_tp_range(arguments.tp or "1")
    folder = resolve_checkpoint(arguments.model)
    with _input_errors():
        verifier = ShardVerifier(folder, arguments.dtype, forward=not arguments.no_forward)
        reports = [verifier.simulate(tp) for tp in numbers]
    _show(arguments, folder, reports)
    _fail_at(_first_difference(reports))


def _verify_as_rank(arguments: argparse.Namespace) -> None:
    """A process that is one rank, perhaps the only one."""
    from paceline.worker.ranks import RankGroup

    numbers = parse_tp_range(arguments.tp or os.environ.get("WORLD_SIZE", "1"))
    if len(numbers) != 1:
        raise InputError(
            f"--tp {arguments.tp} tries several numbers of ranks in one process on the CPU; "
            "where each rank is a process of its own, or on GPUs, give one number"
        )
    ranks = RankGroup(EngineConfig(model="", tensor_parallel_size=numbers[0], device=arguments.device))
    try:
        difference = _verify_among(ranks, arguments)
    except BaseException:
        ranks.abandon()
        raise
    ranks.close()
    _fail_at(difference)


def _verify_among(ranks: RankGroup, arguments: argparse.Namespace) -> str:
    """Verify as one of the ranks, and show on rank 0 what was found; the first difference, "" where there is none."""
    from paceline.worker.verification import ShardVerifier

    name = ""
    with ranks.together():
        if ranks.rank == 0:
            name = str(resolve_checkpoint(arguments.model))
    folder = Path(ranks.exchange(name)[0])
    with ranks.together():
        verifier = ShardVerifier(folder, arguments.dtype, forward=not arguments.no_forward)
    report = verifier.run(ranks)
    difference = ""
    if report is not None:
        _show(arguments, folder, [report])
        difference = _first_difference([report])
    return ranks.exchange(difference)[0]


@contextmanager
def _input_errors() -> Iterator[None]:
    """Faults of a config or a checkpoint are the input's; among ranks `RankGroup.together` sees to that."""
    try:
        yield
    except ValueError as error:
        raise InputError(str(error)) from error


def _first_difference(reports: Sequence[ShardReport]) -> str:
    """The first difference in words; empty where there is none."""
    for report in reports:
        for difference in report.differences:
            return f"at {report.plan.tp} ranks, {difference}"
    return ""


def _fail_at(difference: str) -> None:
    if difference:
        raise VerificationFailed(difference)


def _show(arguments: argparse.Namespace, folder: Path, reports: Sequence[ShardReport]) -> None:
    from paceline.launcher.verify_tables import memory_table, shard_table, to_json, tp_table

    if arguments.json:
        print(json.dumps(to_json(folder.name, reports)))
    else:
        print(f"{folder.name}, {reports[0].plan.dtype}\n")
        if len(reports) == 1:
            print("\n".join([*shard_table(reports[0]), ""]))
        print("\n".join(tp_table(reports)))
        if arguments.config_only:
            print("\ntokens that fit in the cache, by memory of each rank's GPU")
            print("\n".join(memory_table(reports)))
        else:
            print(_summary(reports))
    if arguments.plot is not None:
        from paceline.launcher.verify_plot import draw

        draw(folder.name, reports, arguments.plot)


def _summary(reports: Sequence[ShardReport]) -> str:
    """What was checked, in a line or two."""
    wrong = sum(bool(report.differences) for report in reports)
    if wrong:
        return f"NOT verified: {wrong} of {len(reports)} numbers of ranks differ"
    lines = "verified: the shards put together are the checkpoint bit for bit, copies agree, padding is zero"
    if reports[0].tied_head_checked:
        lines += "\nverified: the checkpoint's lm_head.weight is the embedding again, to which config.json ties it"
    if reports[0].forward_error is not None:
        worst = max(report.forward_error or 0.0 for report in reports)
        lines += (
            f"\nverified: float32 logits of all ranks are those of one (largest difference {worst:.1e} of the largest "
            f"logit, {reports[0].forward_tolerance:.0e} allowed)"
        )
    return lines
