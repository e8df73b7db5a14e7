"""The timed workloads: what engines are asked, in which order, and how their figures are computed.

The requests are those that the engines of benchmarks/peers got, token for token: one generator draws them all, so a
workload that is left out still draws its own.

W1   offline: requests of 100 to 1,024 tokens in and out, all given at once; output tokens a second
W2   one request: milliseconds a token, from the difference of two lengths, which removes the prefill
W3   prefill: prompts of 4,000 tokens and one token out; prompt tokens a second
W3b  time to the first token of a 1,024-token prompt on an idle engine, median of five
W4   decoding at 8 to 256 requests: milliseconds a step, from the difference of two lengths
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

Request = tuple[list[int], int]
"""Prompt token ids, and how many tokens to make."""
Generate = Callable[[Sequence[Request]], None]
"""Runs all requests to their ends."""

NAMES = ("W1", "W2", "W3", "W3b", "W4")


@dataclass(frozen=True)
class Sizes:
    """How much of everything; the defaults are the workloads proper."""

    requests: int = 256
    longest: int = 1024
    one_prompt: int = 512
    one_short: int = 32
    one_long: int = 288
    prefill_requests: int = 16
    prefill_tokens: int = 4000
    first_token_prompt: int = 1024
    batches: tuple[int, ...] = (8, 32, 128, 256)
    batch_prompt: int = 256
    batch_short: int = 8
    batch_long: int = 136

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        return max(
            2 * self.longest,
            self.one_prompt + self.one_long,
            self.prefill_tokens + 1,
            self.first_token_prompt + 1,
            self.batch_prompt + self.batch_long,
        )


QUICK = Sizes(
    requests=4,
    longest=110,
    one_prompt=16,
    one_short=4,
    one_long=12,
    prefill_requests=2,
    prefill_tokens=100,
    first_token_prompt=32,
    batches=(1, 2),
    batch_prompt=16,
    batch_short=2,
    batch_long=10,
)
"""Seconds on a CPU with a tiny model; the figures mean nothing."""


def run_workloads(
    generate: Generate, vocab_size: int, only: Collection[str] = NAMES, sizes: Sizes | None = None
) -> dict[str, float]:
    """Run the workloads named in only, after a warm-up, and return their figures.

    vocab_size: of the model, above 1,010; prompts hold ids from 10 to vocab_size - 1000.
    """
    return _Run(generate, vocab_size, sizes or Sizes()).figures(only)


class _Run:
    def __init__(self, generate: Generate, vocab_size: int, sizes: Sizes) -> None:
        self._generate = generate
        self._last_id = vocab_size - 1000
        self._sizes = sizes
        self._rng = random.Random(0)
        self._measuring = True

    def figures(self, only: Collection[str]) -> dict[str, float]:
        self._seconds([(self._ids(64), 8) for _ in range(4)])
        figures: dict[str, float] = {}
        for name, workload in zip(NAMES, (self._w1, self._w2, self._w3, self._w3b, self._w4), strict=True):
            self._measuring = name in only
            result = workload()
            if self._measuring:
                figures |= result
        return figures

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randint(10, self._last_id) for _ in range(count)]

    def _seconds(self, requests: Sequence[Request]) -> float:
        """How long the requests take; of a workload that is left out they are only drawn."""
        if not self._measuring:
            return 1.0
        start = time.perf_counter()
        self._generate(requests)
        return time.perf_counter() - start

    def _w1(self) -> dict[str, float]:
        sizes, draw = self._sizes, self._rng.randint
        requests = [(self._ids(draw(100, sizes.longest)), draw(100, sizes.longest)) for _ in range(sizes.requests)]
        seconds = self._seconds(requests)
        return {"W1_offline_out_tok_s": sum(count for _, count in requests) / seconds, "W1_seconds": seconds}

    def _w2(self) -> dict[str, float]:
        sizes = self._sizes
        prompt = self._ids(sizes.one_prompt)

        def one(count: int) -> float:
            # Another first token, so that no run finds the prompt of the one before in a prefix cache.
            return self._seconds([(self._ids(1) + prompt[1:], count)])

        one(sizes.one_short // 2)
        short = statistics.median([one(sizes.one_short) for _ in range(3)])
        long = statistics.median([one(sizes.one_long) for _ in range(3)])
        return {"W2_b1_ms_per_tok": (long - short) / (sizes.one_long - sizes.one_short) * 1e3}

    def _w3(self) -> dict[str, float]:
        sizes = self._sizes
        requests = [(self._ids(sizes.prefill_tokens), 1) for _ in range(sizes.prefill_requests)]
        seconds = self._seconds(requests)
        return {"W3_prefill_tok_s": sizes.prefill_requests * sizes.prefill_tokens / seconds}

    def _w3b(self) -> dict[str, float]:
        prompts = [self._ids(self._sizes.first_token_prompt) for _ in range(5)]
        return {"W3b_ttft_1024_ms": statistics.median(self._seconds([(prompt, 1)]) for prompt in prompts) * 1e3}

    def _w4(self) -> dict[str, float]:
        sizes = self._sizes
        figures = {}
        for batch in sizes.batches:
            short, long = (
                self._seconds([(self._ids(sizes.batch_prompt), count) for _ in range(batch)])
                for count in (sizes.batch_short, sizes.batch_long)
            )
            figures[f"W4_b{batch}_ms_per_step"] = (long - short) / (sizes.batch_long - sizes.batch_short) * 1e3
        return figures
