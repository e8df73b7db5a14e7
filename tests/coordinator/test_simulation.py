"""Whole lives of many requests: random traffic, tight memory, aborts at any moment, shared prefixes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

STOP_IDS = range(0, 1000, 25)
END_ID = 999


def random_prompt(generator: random.Random) -> list[int]:
    """Often with a beginning that others have too."""
    shared = [generator.randrange(3)] * generator.choice([0, 4, 8, 13])
    return shared + [generator.randrange(1000) for _ in range(generator.randint(1, 24))]


@dataclass
class Traffic:
    """Random arrivals and aborts: what was asked for, and what the answers must be."""

    harness: Any
    toy_answer: Callable[..., list[int]]
    generator: random.Random
    expected: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    scored: dict[str, list[int]] = field(default_factory=dict)
    """The prompts whose log-probabilities were asked for."""
    aborted: set[str] = field(default_factory=set)

    def arrive(self) -> None:
        index = len(self.expected)
        prompt, max_tokens = random_prompt(self.generator), self.generator.randint(1, 24)
        grammar = self.generator.choice([None, None, "3 4", "9 8"])
        ends = [*STOP_IDS] if grammar is None else [*STOP_IDS, END_ID]
        self.harness.add(
            str(index),
            prompt,
            max_tokens=max_tokens,
            seed=index,
            stop_token_ids=list(STOP_IDS),
            grammar=grammar,
            prompt_logprobs=(scored := self.generator.choice([None, None, 0])),
            eos_token_ids=ends[len(STOP_IDS) :],
            priority=self.generator.choice([0, 0, 0, 1]),
            cache_salt=self.generator.choice(["", "", "tenant"]),
        )
        max_tokens = min(max_tokens, 64 - len(prompt))
        answer = self.toy_answer(prompt, max_tokens, seed=index, stop_ids=ends, grammar=grammar)
        self.expected[str(index)] = answer, "stop" if answer[-1] in ends else "length"
        self.scored[str(index)] = [] if scored is None else prompt

    def abort_one(self) -> None:
        """Abort one of the latest: it waits, runs, is preempted, or just finished."""
        victim = str(max(len(self.expected) - 1 - self.generator.randrange(12), 0))
        if self.harness.answers[victim].final is None:
            self.aborted.add(victim)
        self.harness.coordinator.abort(victim)


@pytest.mark.parametrize("policy", ["prompts-first", "decodes-first"])
@pytest.mark.parametrize("num_blocks", [30, 200])
@pytest.mark.parametrize("depth", [2, 4])
def test_random_traffic_is_answered_exactly(make_harness, toy_answer, monkeypatch, depth, num_blocks, policy):
    """12,000 requests over the cases; results come up to depth - 1 steps late by chance.

    After every step all invariants hold, and the worker has found each history where the plans said.
    """
    monkeypatch.setattr("paceline.coordinator.coordinator.MAX_IN_FLIGHT", depth)
    generator = random.Random(num_blocks)
    harness = make_harness(num_blocks=num_blocks, max_model_len=64, policy=policy)
    harness.executor.delay = lambda: generator.randrange(depth)
    traffic = Traffic(harness, toy_answer, generator)
    while len(traffic.expected) < 1500:
        for _ in range(generator.choice([0, 0, 1, 3])):
            traffic.arrive()
        harness.step()
        if traffic.expected and generator.random() < 0.1:
            traffic.abort_one()
    outputs = harness.run()
    for name, (answer, expected_reason) in traffic.expected.items():
        reason = harness.final(name).finish_reason
        if name in traffic.aborted:
            assert (outputs[name], reason) == (answer[: len(outputs[name])], "abort")
        else:
            assert (outputs[name], reason) == (answer, expected_reason)
            scores = [(-score.chosen, score.rank) for score in harness.answers[name].prompt_logprobs]
            assert scores == list(zip(traffic.scored[name][1:], itertools.count(1), strict=False))
    stats = harness.coordinator.stats()
    assert (stats.preemptions > 0) == (num_blocks == 30)
    assert stats.cached_prompt_tokens > 0
    assert sum(stats.finished.values()) == len(outputs)
    assert stats.finished["abort"] == len(traffic.aborted) > 0
    assert stats.generated_tokens == sum(map(len, outputs.values()))


def test_aborts_while_a_prompt_is_half_computed_leave_no_half_block_behind(make_harness, toy_answer):
    """Field report B31: abort after any number of chunks, waiting, preempted, or as it finishes; then the same prompt
    must be right."""
    generator = random.Random(7)
    harness = make_harness(num_blocks=300, max_model_len=1100, max_batched_tokens=64)
    harness.executor.delay = lambda: generator.randrange(2)
    for round_number in range(500):
        length = generator.choice([1000, 200, 130])
        prompt = [round_number] * length
        harness.add(f"{round_number} aborted", prompt, max_tokens=3)
        for _ in range(generator.randrange(length // 64 + 5)):
            harness.step()
        harness.coordinator.abort(f"{round_number} aborted")
        harness.coordinator.abort(f"{round_number} aborted")
        harness.add(f"{round_number} again", prompt[: generator.choice([length, 90])], max_tokens=2)
        harness.run()
        usage = harness.coordinator.stats().blocks
        assert usage.free + usage.cached == 300
    assert {name: tokens for name, tokens in harness.run().items() if name.endswith("again")} == {
        f"{number} again": toy_answer(prompt, 2)
        for number, prompt in (
            (number, [number] * harness.final(f"{number} again").num_prompt_tokens) for number in range(500)
        )
    }


@pytest.mark.parametrize("delay", [0, 1])
def test_tight_and_ample_memory_answer_alike(make_harness, delay):
    """Seeds, min_tokens and stops hold across preemption; nothing is handed out twice."""
    outputs = {}
    for num_blocks in (40, 400):
        harness = make_harness(num_blocks=num_blocks, max_model_len=120, delay=delay)
        for index in range(30):
            harness.add(
                str(index),
                [index] * (3 + index),
                max_tokens=64,
                min_tokens=20,
                seed=index,
                presence_penalty=1.5,
                stop_token_ids=list(range(0, 1000, 20)),
                logprobs=0,
            )
        outputs[num_blocks] = harness.run()
        assert (harness.coordinator.stats().preemptions > 0) == (num_blocks == 40)
        for answer in harness.answers.values():
            assert [logprob.chosen for logprob in answer.logprobs] == [-float(token) for token in answer.tokens]
        assert all(admission.sampling.presence_penalty == 1.5 for admission in harness.executor.admissions)
    assert outputs[40] == outputs[400]
    assert all(len(tokens) > 20 for tokens in outputs[40].values())


def test_no_request_starves_behind_a_stream_of_new_ones(make_harness):
    """A long prompt and a long answer both end, although short requests never cease to arrive."""
    for policy in ("prompts-first", "decodes-first"):
        harness = make_harness(num_blocks=60, policy=policy, max_batched_tokens=8)
        harness.add("long answer", [1], max_tokens=100)
        harness.add("long prompt", list(range(100)), max_tokens=5)
        number = 0
        while harness.answers["long answer"].final is None or harness.answers["long prompt"].final is None:
            harness.add(f"short {number}", [number % 1000] * 10, max_tokens=5)
            number += 1
            harness.step()
            assert number < 300
        long_answer_steps = harness.final("long answer").timings.finished
        assert long_answer_steps == 101, "a running answer gets a token in every step"


def test_ten_thousand_that_wait_are_served_in_the_order_they_came(make_harness):
    """Field report B58; every tenth gives up while it waits."""
    harness = make_harness(num_blocks=600, max_num_seqs=128, max_batched_tokens=512)
    for number in range(10_000):
        harness.add(str(number), [number % 1000, number // 1000], max_tokens=2)
    for number in range(0, 10_000, 10):
        harness.coordinator.abort(str(number))
    finished = []
    while harness.coordinator.has_work:
        finished += [int(event.request_id) for event in harness.step() if event.finish_reason == "length"]
    assert finished == [number for number in range(10_000) if number % 10]
    assert harness.coordinator.stats().finished["abort"] == 1000


def conversation_traffic(generator: random.Random) -> list[list[int]]:
    """Prompts as conversations make them: a few system prompts, and turns that repeat all that was said before."""
    systems = [[generator.randrange(1000) for _ in range(generator.randint(20, 60))] for _ in range(4)]
    histories = [list(generator.choice(systems)) for _ in range(40)]
    prompts = []
    for _ in range(300):
        history = generator.choice(histories)
        history += [generator.randrange(1000) for _ in range(generator.randint(3, 20))]
        if len(history) > 380:
            del history[60:]
        prompts.append(list(history))
    return prompts


def ideal_hits(prompts: list[list[int]], block_size: int) -> int:
    """Tokens that a cache which forgets nothing finds, in whole blocks, one token left to compute."""
    known: set[tuple[int, ...]] = set()
    hits = 0
    for prompt in prompts:
        found = 0
        while found + block_size < len(prompt) and tuple(prompt[: found + block_size]) in known:
            found += block_size
        hits += found
        known.update(tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size))
    return hits


def test_an_ample_cache_finds_what_an_ideal_one_finds(make_harness):
    prompts = conversation_traffic(random.Random(5))
    harness = make_harness(num_blocks=20000, max_num_seqs=4, max_batched_tokens=512)
    for index, prompt in enumerate(prompts):
        harness.add(str(index), prompt, max_tokens=1)
        harness.step()
    harness.run()
    stats = harness.coordinator.stats()
    assert stats.cached_prompt_tokens == ideal_hits(prompts, 4)
    assert stats.cached_prompt_tokens > 0.7 * stats.prompt_tokens


def test_a_small_cache_keeps_what_was_used_last(make_harness):
    """With room for a quarter of the traffic, hits equal those of a plain LRU of blocks that forgets ends first."""
    prompts = conversation_traffic(random.Random(6))
    num_blocks = 600
    harness = make_harness(num_blocks=num_blocks, max_num_seqs=1, max_batched_tokens=512, delay=0)
    kept: dict[tuple[int, ...], None] = {}
    for index, prompt in enumerate(prompts):
        beginnings = [tuple(prompt[:end]) for end in range(4, len(prompt) + 1, 4)]
        found = 0
        while found < (len(prompt) - 1) // 4 and beginnings[found] in kept:
            found += 1
        harness.add(str(index), prompt, max_tokens=1)
        harness.run()
        assert harness.final(str(index)).cached_tokens == found * 4
        if found < len(beginnings) and beginnings[found] in kept:
            found += 1  # the last block was known too, but computed again: its second copy is not kept
            beginnings_used = beginnings[: found - 1]
        else:
            beginnings_used = beginnings
        for beginning in beginnings_used:
            kept.pop(beginning, None)
        needed = -(-len(prompt) // 4)
        while len(kept) > num_blocks - needed:
            del kept[next(iter(kept))]
        kept.update(dict.fromkeys(reversed(beginnings_used)))
    assert harness.coordinator.stats().cached_prompt_tokens < ideal_hits(prompts, 4)
