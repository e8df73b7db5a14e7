"""Log-probabilities of prompts: every token but the first once, whatever the chunks, the cache and preemption do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.coordinator.errors import EngineError, InputError
from paceline.coordinator.messages import StepResult
from paceline.coordinator.sampling_params import SamplingParams

MakeHarness = Callable[..., Any]


def scores(harness: Any, name: str) -> list[tuple[float, int]]:
    """(token, place) of each score."""
    return [(-each.chosen, each.rank) for each in harness.answers[name].prompt_logprobs]


def expected(prompt: list[int]) -> list[tuple[float, int]]:
    return [(float(token), place) for place, token in enumerate(prompt) if place > 0]


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 100])
def test_a_prompt_is_scored_whole_in_any_chunks_and_with_the_first_token(
    make_harness: MakeHarness, length: int
) -> None:
    harness = make_harness()
    prompt = list(range(100, 100 + length))
    harness.add("a", prompt, max_tokens=3, prompt_logprobs=2)
    harness.add("b", [7] * 9, max_tokens=20)
    while not harness.answers["a"].tokens:
        assert harness.answers["a"].prompt_logprobs == []
        harness.step()
    assert scores(harness, "a") == expected(prompt)
    harness.run()
    assert scores(harness, "a") == expected(prompt), "and not again"
    assert scores(harness, "b") == []


@pytest.mark.parametrize("length", [1, 2, 32, 33, 100])
@pytest.mark.parametrize("delay", [0, 1])
def test_no_tokens_at_all(make_harness: MakeHarness, length: int, delay: int) -> None:
    harness = make_harness(delay=delay)
    prompt = list(range(length))
    harness.add("a", prompt, max_tokens=0, prompt_logprobs=0, grammar="5 3")
    assert harness.run() == {"a": []}
    assert scores(harness, "a") == expected(prompt)
    assert harness.final("a").finish_reason == "length"
    assert sum(harness.executor.token_counts) == length - 1


def test_a_prompt_that_the_cache_holds_is_computed_again_and_serves_others(make_harness: MakeHarness) -> None:
    harness = make_harness()
    prompt = list(range(24))
    for name, wish in (("plain", None), ("scored", 0), ("after", None)):
        harness.add(name, prompt, max_tokens=2, prompt_logprobs=wish)
        harness.run()
    assert [harness.final(name).cached_tokens for name in ("plain", "scored", "after")] == [0, 0, 20]
    assert scores(harness, "scored") == expected(prompt)


def test_preemption_in_the_middle_of_a_prompt_repeats_nothing(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=18, max_model_len=70, max_batched_tokens=3)
    prompt = list(range(60))
    harness.add("answer", [1], max_tokens=30)
    harness.add("scored", prompt, max_tokens=2, prompt_logprobs=0)
    harness.run()
    assert harness.coordinator.stats().preemptions == 1
    assert [len(each.token_ids) for each in harness.executor.admissions] == [1, 60, 60]
    assert scores(harness, "scored") == expected(prompt)


def test_preemption_of_answers_scores_their_prompts_no_more(make_harness: MakeHarness) -> None:
    """Those that are preempted in the middle of their answers are not scored again."""
    harness = make_harness(num_blocks=24, max_model_len=80, max_batched_tokens=8)
    prompts = {str(index): [index] * (20 + index) for index in range(6)}
    for name, prompt in prompts.items():
        harness.add(name, prompt, max_tokens=30, prompt_logprobs=0)
    for _ in range(3):
        harness.step()
    harness.add("first", [9] * 40, max_tokens=30, priority=-1)
    harness.run()
    assert harness.coordinator.stats().preemptions > 0
    assert {name: scores(harness, name) for name in prompts} == {
        name: expected(prompt) for name, prompt in prompts.items()
    }
    again = [each for each in harness.executor.admissions if len(each.token_ids) > each.prompt_len]
    assert again
    assert all(each.sampling.prompt_logprobs == -1 for each in again)


def test_too_few_scores_are_an_error_of_the_ranks(make_harness: MakeHarness) -> None:
    harness = make_harness(delay=0)
    harness.executor.submit = lambda plan: results.append(StepResult(plan.step, [1]))
    harness.executor.collect = lambda wait: results.pop() if results else None
    results: list[StepResult] = []
    harness.add("a", [1, 2, 3], prompt_logprobs=0)
    with pytest.raises(EngineError, match="0 prompt tokens in step 0, not of 2"):
        harness.step()


def test_no_tokens_and_no_scores_is_nothing_to_ask_for() -> None:
    with pytest.raises(InputError, match="max_tokens must be at least 1"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InputError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=21)
