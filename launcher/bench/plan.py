"""What is to be sent and when: drawn once, from a seed or a trace, before anything is sent."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launcher.bench.traces import read_trace


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts, drawn evenly between two bounds that are both possible."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One of them."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the load."""

    number: int
    due: float
    """Seconds after the start; 0 where requests follow each other instead."""
    prompt_tokens: int
    output_tokens: int
    block_ids: Sequence[int] | None = None
    """As TraceRow has them."""


def poisson_arrivals(
    rate: float, prompt: Lengths, output: Lengths, seed: int, *, duration: float | None
) -> Iterator[PlannedRequest]:
    """Requests that come independently of each other, `rate` a second on average, until the duration is over."""
    arrivals, lengths = random.Random(f"arrivals {seed}"), random.Random(f"lengths {seed}")
    due, number = 0.0, 0
    while duration is None or due < duration:
        yield PlannedRequest(number, due, prompt.draw(lengths), output.draw(lengths))
        due += arrivals.expovariate(rate)
        number += 1


def random_requests(prompt: Lengths, output: Lengths, seed: int) -> Iterator[PlannedRequest]:
    """Requests without times, for clients that send the next one when the last was answered."""
    lengths = random.Random(f"lengths {seed}")
    number = 0
    while True:
        yield PlannedRequest(number, 0.0, prompt.draw(lengths), output.draw(lengths))
        number += 1


def trace_requests(path: Path, scale: float, *, duration: float | None) -> Iterator[PlannedRequest]:
    """A trace's requests, `scale` times as many a second, until the duration (of the replay) is over."""
    for number, row in enumerate(read_trace(path)):
        due = row.seconds / scale
        if duration is not None and due >= duration:
            return
        yield PlannedRequest(number, due, row.prompt_tokens, row.output_tokens, row.block_ids)
