"""A run's figures as a person reads them, and as a file keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.launcher.bench.records import RequestRecord
from paceline.launcher.bench.statistics import PERCENTILES, Figures, Summary

LATE_SECONDS = 0.05
"""A client whose sends are later than this (the 99th percentile) has not made the load that was asked for."""
BUSY = 0.8
"""Share of a core from which on the client's own work is in the latencies."""

UNLIKE_CACHED = 0.02
"""Share of cached prompt tokens that prompts which share nothing do not reach by chance."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that is said of a run."""

    title: str
    settings: Mapping[str, Any]
    figures: Figures
    slo: Mapping[str, float]
    left_out: int
    """Requests of the plan that the model is too short for."""
    max_model_len: int | None
    refused_fields: Sequence[str]
    cpu_seconds: float
    """Of the client."""
    interrupted: bool
    unlike_prompts: bool
    """Whether no prompt begins as another does."""

    @property
    def cpu_per_token(self) -> float | None:
        """Seconds of the client's CPU for each output token."""
        return self.cpu_seconds / self.figures.output_tokens if self.figures.output_tokens else None

    @property
    def cpu_share(self) -> float:
        """Of one core."""
        return self.cpu_seconds / self.figures.seconds if self.figures.seconds else 0.0

    def lines(self) -> Iterator[str]:
        """As text, for a terminal of 80 columns or more."""
        figures = self.figures
        yield self.title
        yield ""
        yield f"requests    {figures.sent} of {figures.planned} sent, {figures.answered} answered"
        for error, count in figures.errors.items():
            yield f"            {count} failed: {error}"
        if figures.unfinished:
            yield f"            {figures.unfinished} were still running when this was interrupted"
        yield f"seconds     {figures.seconds:.1f}"
        yield f"requests/s  {figures.request_rate:.2f}"
        if figures.goodput is not None:
            limits = ", ".join(f"{name} {limit * 1000:g} ms" for name, limit in self.slo.items())
            yield f"goodput     {figures.goodput:.2f} requests/s: {figures.good} of {figures.sent} within {limits}"
        cached = "" if figures.cached_share is None else f", {figures.cached_share:.1%} of them cached"
        yield f"tokens/s    {figures.output_rate:,.1f} out, {figures.prompt_rate:,.1f} in{cached}"
        yield f"tokens      {figures.output_tokens:,} out, {figures.prompt_tokens:,} in"
        yield ""
        yield " " * 12 + "".join(f"{name:>10}" for name in ("mean", *(f"p{q}" for q in PERCENTILES), "max"))
        rows = (("TTFT", figures.ttft), ("ITL", figures.itl), ("E2E", figures.e2e), ("sent late", figures.late))
        for name, values in rows:
            if values.count:
                yield f"{name + ' ms':<12}" + "".join(f"{value:>10.1f}" for value in _milliseconds(values))
        yield ""
        if self.cpu_per_token is not None:
            yield f"client      {self.cpu_per_token * 1e6:.1f} us of CPU a token, {self.cpu_share:.0%} of a core"
        yield from (f"note: {note}" for note in self.notes())

    def notes(self) -> Iterator[str]:
        """What a reader must know before believing the figures."""
        figures = self.figures
        if self.interrupted:
            yield "interrupted: these are the figures so far"
        if self.left_out:
            yield f"{self.left_out} requests are longer than the model's {self.max_model_len} tokens and were left out"
        if self.unlike_prompts and (figures.cached_share or 0.0) > UNLIKE_CACHED:
            yield "prompts were cached that no other begins like: has this seed run before? choose another with --seed"
        if figures.late.count and figures.late.percentiles[99] > LATE_SECONDS:
            yield "the client fell behind: requests were sent later than planned (see `sent late`)"
        if self.cpu_share > BUSY:
            yield "the client was busy itself: latencies hold its own delays; use a smaller load a process"
        if self.refused_fields:
            yield f"the server does not take {', '.join(self.refused_fields)}, and went without"
        if figures.short_answers:
            yield f"{figures.short_answers} answers ended before their planned length"
        if figures.counted_events:
            yield "the server sent no usage: every event was counted as one token"
        if figures.prompt_tokens != figures.planned_prompt_tokens:
            yield f"{figures.planned_prompt_tokens:,} prompt tokens were planned; the server counted as above"

    def as_json(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        """As JSON: everything above and one row a request, times in seconds since the start of the run."""
        figures = self.figures
        return {
            "settings": dict(self.settings),
            "seconds": round(figures.seconds, 6),
            "interrupted": self.interrupted,
            "requests": {
                "planned": figures.planned,
                "left_out": self.left_out,
                "sent": figures.sent,
                "answered": figures.answered,
                "unfinished": figures.unfinished,
                "errors": dict(figures.errors),
            },
            "requests_per_second": round(figures.request_rate, 4),
            "slo_ms": {name: limit * 1000 for name, limit in self.slo.items()},
            "goodput_per_second": None if figures.goodput is None else round(figures.goodput, 4),
            "output_tokens": figures.output_tokens,
            "prompt_tokens": figures.prompt_tokens,
            "output_tokens_per_second": round(figures.output_rate, 2),
            "prompt_tokens_per_second": round(figures.prompt_rate, 2),
            "cached_share": None if figures.cached_share is None else round(figures.cached_share, 6),
            "ttft_ms": figures.ttft.as_json(),
            "itl_ms": figures.itl.as_json(),
            "e2e_ms": figures.e2e.as_json(),
            "late_ms": figures.late.as_json(),
            "client_cpu_seconds": round(self.cpu_seconds, 3),
            "notes": list(self.notes()),
            "columns": ["due", "sent", "first", "ended", "prompt_tokens", "cached_tokens", "output_tokens", "error"],
            "rows": [_row(record) for record in records],
        }


def _row(record: RequestRecord) -> list[Any]:
    times = (record.plan.due, record.sent, record.first, record.ended)
    rounded = [None if time is None else round(time, 6) for time in times]
    return [*rounded, record.prompt_tokens, record.cached_tokens, record.tokens, record.error]


def _milliseconds(values: Summary) -> list[float]:
    return [(value or 0.0) * 1000 for value in (values.mean, *values.percentiles.values(), values.max)]
