"""The workloads ask what the other engines were asked, and their figures are what their names say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import workloads

PEERS_REQUESTS = "e2e8d54fd18faee757a060d4cb832d7287a544824bd2f27a1aab427697e4fbbf"
"""SHA-256 of all 23 calls' requests, in order, that the engines of benchmarks/peers got with Qwen3's vocabulary."""
TOKEN_SECONDS = 0.002


class SlowEngine:
    """Takes TOKEN_SECONDS for each step of as many tokens as requests, and notes what it was asked."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.calls: list[list[workloads.Request]] = []
        self.now = 0.0
        """By its own clock."""
        self._step_seconds = step_seconds

    def __call__(self, requests: Sequence[workloads.Request]) -> None:
        self.calls.append(list(requests))
        self.now += self._step_seconds * max(count for _, count in requests)


def test_the_requests_are_those_of_the_peers() -> None:
    engine = SlowEngine()
    workloads.run_workloads(engine, 151936)
    digest = hashlib.sha256()
    for call in engine.calls:
        digest.update(json.dumps(call).encode())
    assert digest.hexdigest() == PEERS_REQUESTS


@pytest.mark.parametrize("name", workloads.NAMES)
def test_a_workload_alone_asks_the_same(name: str) -> None:
    together, alone = SlowEngine(), SlowEngine()
    workloads.run_workloads(together, 2048, sizes=workloads.QUICK)
    figures = workloads.run_workloads(alone, 2048, [name], workloads.QUICK)
    assert {key.split("_")[0] for key in figures} == {name}
    first = next(index for index, call in enumerate(together.calls) if call == alone.calls[1])
    assert alone.calls == [together.calls[0], *together.calls[first : first + len(alone.calls) - 1]]


def test_figures_are_of_a_token_and_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowEngine(TOKEN_SECONDS)
    monkeypatch.setattr(workloads, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    figures = workloads.run_workloads(engine, 2048, ["W2", "W3b", "W4"], workloads.QUICK)
    assert set(figures) == {"W2_b1_ms_per_tok", "W3b_ttft_1024_ms", "W4_b1_ms_per_step", "W4_b2_ms_per_step"}
    for name, value in figures.items():
        assert value == pytest.approx(TOKEN_SECONDS * 1e3), name


def test_no_prompt_of_one_request_is_found_in_a_prefix_cache() -> None:
    engine = SlowEngine()
    workloads.run_workloads(engine, 151936)
    starts = [tuple(prompt[:16]) for call in engine.calls for prompt, _ in call]
    assert len(set(starts)) == len(starts)
