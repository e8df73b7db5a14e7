"""What `verify` prints: tables of a model's shards, of its ranks' memory, and the same as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.worker.verification import ShardReport

GIB = 1 << 30
MEMORY_SIZES_GIB = (16, 24, 40, 48, 80, 96, 141, 192)
"""Of GPUs in use."""
CACHE_SHARE = 0.9
"""Of a GPU's memory that weights and cache may take, as the engine has it by default."""

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def shard_table(report: ShardReport) -> list[str]:
    """Parameter, rule, shape and bytes on each rank, and whether it was verified; equal layers share a line."""
    groups: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for parameter in report.plan.parameters:
        shape = " x ".join(map(str, parameter.shape))
        verified = "yes" if report.is_verified(parameter.name) else "NO" if report.checked else "-"
        key = (_LAYER.sub("*", parameter.name), parameter.rule, shape)
        groups.setdefault(key, []).append((parameter.num_bytes, verified))
    rows = [("parameter", "rule", "shape per rank", "number", "bytes per rank", "verified")]
    for (name, rule, shape), members in groups.items():
        marks = {mark for _, mark in members}
        verified = "NO" if "NO" in marks else marks.pop()
        rows.append((name, rule, shape, str(len(members)), f"{sum(size for size, _ in members):,}", verified))
    return _align(rows, right={3, 4})


def tp_table(reports: Sequence[ShardReport]) -> list[str]:
    """One line for each number of ranks."""
    rows = [("ranks", "weights per rank", "padding", "cache bytes per token and rank", "shards", "forward difference")]
    for report in reports:
        plan = report.plan
        rows.append(
            (
                str(plan.tp),
                f"{plan.weight_bytes / GIB:.3f} GiB",
                f"{_padding_share(report):.1%}",
                f"{plan.kv_bytes_per_token:,}",
                _shards_word(report),
                "-" if report.forward_error is None else f"{report.forward_error:.1e}",
            )
        )
    return _align(rows, right={0, 1, 2, 3, 5})


def memory_table(reports: Sequence[ShardReport]) -> list[str]:
    """Tokens that the cache of all ranks together can hold, for each number of ranks and size of GPU."""
    head = ("ranks", *(f"{size} GiB" for size in MEMORY_SIZES_GIB))
    rows = [(str(report.plan.tp), *(_tokens_text(report, size) for size in MEMORY_SIZES_GIB)) for report in reports]
    return _align([head, *rows], right=set(range(len(head))))


def cache_tokens(report: ShardReport, memory_gib: int) -> int:
    """Tokens that fit GPUs of a size beside the weights; not above 0 where these do not fit. Workspace not counted."""
    room = CACHE_SHARE * memory_gib * GIB - report.plan.weight_bytes
    return int(room // report.plan.kv_bytes_per_token)


def to_json(model: str, reports: Sequence[ShardReport]) -> dict[str, Any]:
    """The whole report; bytes are of one rank."""
    return {
        "model": model,
        "dtype": reports[0].plan.dtype,
        "verified": all(report.checked and not report.differences for report in reports),
        "results": [_report_json(report) for report in reports],
    }


def _report_json(report: ShardReport) -> dict[str, Any]:
    return {
        "tp": report.plan.tp,
        "checked": report.checked,
        "tied_head_checked": report.tied_head_checked,
        "weight_bytes": report.plan.weight_bytes,
        "kv_bytes_per_token": report.plan.kv_bytes_per_token,
        "cache_tokens": {f"{size} GiB": max(0, cache_tokens(report, size)) for size in MEMORY_SIZES_GIB},
        "forward": None
        if report.forward_error is None
        else {"largest_difference": _json_number(report.forward_error), "tolerance": report.forward_tolerance},
        "differences": [
            {
                "check": difference.check,
                "parameter": difference.parameter,
                "rank": difference.rank,
                "index": list(difference.index),
                "found": _json_number(difference.found),
                "expected": _json_number(difference.expected),
            }
            for difference in report.differences
        ],
        "parameters": [
            {
                "name": parameter.name,
                "rule": parameter.rule,
                "shape": list(parameter.shape),
                "bytes": parameter.num_bytes,
                "verified": report.is_verified(parameter.name),
            }
            for parameter in report.plan.parameters
        ],
    }


def _json_number(value: float) -> float | str:
    """JSON has no NaN and no infinity; they become text."""
    return value if math.isfinite(value) else repr(value)


def _padding_share(report: ShardReport) -> float:
    """Share of a rank's weights, taken over all ranks, that is padding."""
    parameters = report.plan.parameters
    padding = sum(parameter.padding_share * parameter.num_bytes for parameter in parameters)
    return padding / report.plan.weight_bytes


def _shards_word(report: ShardReport) -> str:
    if not report.checked:
        return "not checked"
    wrong = sum(not report.is_verified(parameter.name) for parameter in report.plan.parameters)
    return f"{wrong} differ" if wrong else f"all {len(report.plan.parameters)} verified"


def _tokens_text(report: ShardReport, memory_gib: int) -> str:
    tokens = cache_tokens(report, memory_gib)
    return f"{tokens:,}" if tokens > 0 else "-"


def _align(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Columns two spaces apart, those in `right` set to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def cells(row: Sequence[str]) -> Iterator[str]:
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            yield cell.rjust(width) if number in right else cell.ljust(width)

    return ["  ".join(cells(row)).rstrip() for row in rows]
