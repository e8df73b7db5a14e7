"""Answers by a grammar: what each step may sample, who waits for whom, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.errors import InputError
from paceline.coordinator.messages import Limits
from paceline.coordinator.sampling_params import SamplingParams

END_ID = 999
ENDING = {"grammar": "400 3", "eos_token_ids": [END_ID]}
"""At least 3 tokens, at most 6, and the end."""

MakeHarness = Callable[..., Any]
ToyAnswer = Callable[..., list[int]]


@pytest.mark.parametrize("delay", [0, 1])
def test_every_token_is_one_that_the_grammar_allows(
    make_harness: MakeHarness, toy_answer: ToyAnswer, delay: int
) -> None:
    harness = make_harness(delay=delay)
    for index in range(12):
        harness.add(str(index), [index] * (index + 1), seed=index, max_tokens=30, **ENDING)
    outputs = harness.run()
    for index in range(12):
        expected = toy_answer([index] * (index + 1), 30, seed=index, stop_ids=[END_ID], grammar="400 3")
        assert outputs[str(index)] == expected
        assert 4 <= len(expected) <= 7
        assert harness.final(str(index)).finish_reason == "stop"
        assert harness.final(str(index)).stop_token == END_ID


def test_the_others_get_a_token_in_every_step_while_one_waits_for_its_last(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.add("free", [1], max_tokens=20)
    harness.add("bound", [2], max_tokens=20, grammar="5 20")
    harness.run()
    sizes = [len(rows.slots) for rows in harness.executor.rows]
    assert sizes[:20] == [2, 1] * 10
    assert harness.final("free").timings.finished == 21
    assert harness.executor.most_in_flight == 2


def test_alone_it_neither_spins_nor_runs_ahead(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.add("bound", [2], max_tokens=10, grammar="5 20")
    harness.run()
    assert harness.executor.most_in_flight == 1
    assert len(harness.executor.plans) == 10
    assert harness.now == 20, "a call that submits and one that waits, for each token"
    assert harness.executor.num_waits == 10


def test_more_decodes_than_the_budget_wait_for_the_next_step(make_harness: MakeHarness, toy_answer: ToyAnswer) -> None:
    """Eight prompts of one token fit two steps of four; all eight answers want a token of the third."""
    harness = make_harness(max_batched_tokens=4, max_num_seqs=8)
    # The results of the two steps that are under way then come together.
    harness.executor.delay = lambda: 0 if len(harness.executor.plans) % 2 == 0 else 9
    for index in range(8):
        harness.add(str(index), [index], seed=index, max_tokens=9, grammar="5 20")
    outputs = harness.run()
    assert max(harness.executor.token_counts) == 4
    assert outputs == {str(index): toy_answer([index], 9, seed=index, grammar="5 20") for index in range(8)}


def test_min_tokens_holds_the_end_back_and_ignore_eos_for_good(
    make_harness: MakeHarness, toy_answer: ToyAnswer
) -> None:
    harness = make_harness()
    for index in range(10):
        harness.add(f"min {index}", [index], seed=index, max_tokens=30, min_tokens=5, **ENDING)
        harness.add(f"ignore {index}", [index], seed=index, max_tokens=30, ignore_eos=True, **ENDING)
    outputs = harness.run()
    for index in range(10):
        held = outputs[f"min {index}"]
        assert held.index(END_ID) == len(held) - 1 >= 5
        # Where the grammar is at its end and the end ids are not to be chosen, there is nothing more to say.
        assert len(outputs[f"ignore {index}"]) == 6
        assert END_ID not in outputs[f"ignore {index}"]
        assert harness.final(f"ignore {index}").finish_reason == "stop"
        assert harness.final(f"ignore {index}").stop_token is None
    assert any(len(outputs[f"min {index}"]) == 6 for index in range(10)), "it may end from min_tokens on"


def test_a_grammar_that_allows_nothing_ends_at_once(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.add("nothing", [5, END_ID], ignore_eos=True, grammar="5 0", eos_token_ids=[END_ID])
    assert harness.run() == {"nothing": []}
    assert harness.final("nothing").finish_reason == "stop"
    assert harness.executor.plans == []


@pytest.mark.parametrize("grammar", ["wrong", "5 4 !"])
def test_a_grammar_that_fails_ends_its_own_request_alone(
    make_harness: MakeHarness, toy_answer: ToyAnswer, grammar: str
) -> None:
    harness = make_harness()
    harness.add("failing", [1], max_tokens=9, grammar=grammar)
    harness.add("bound", [2], max_tokens=9, grammar="5 20")
    harness.add("free", [3], max_tokens=9)
    outputs = harness.run()
    assert outputs["bound"] == toy_answer([2], 9, grammar="5 20")
    assert outputs["free"] == toy_answer([3], 9)
    final = harness.final("failing")
    assert (final.finish_reason, final.error, len(outputs["failing"])) == (
        ("error", "this one is wrong", 0) if grammar == "wrong" else ("error", "too hard to follow", 4)
    )
    assert harness.final("bound").error == ""
    assert harness.coordinator.stats().finished == {"error": 1, "length": 2}


def test_others_run_while_a_grammar_is_compiled_and_it_keeps_its_place(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=1)
    harness.grammars.hold = True
    harness.add("bound", [2], max_tokens=2, grammar="5 20")
    for index in range(3):
        harness.add(str(index), [index], max_tokens=4)
    assert harness.coordinator.stats().waiting == 4
    while harness.answers["0"].final is None:
        harness.step()
    harness.grammars.release()
    harness.run()
    finished = {name: answer.final.timings.finished for name, answer in harness.answers.items()}
    assert sorted(finished, key=finished.__getitem__) == ["0", "bound", "1", "2"]


def test_a_loop_that_only_compiles_goes_on_and_its_request_can_be_aborted(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.grammars.hold = True
    harness.add("bound", [2], max_tokens=2, grammar="5 20")
    harness.add("left", [2], max_tokens=2, grammar="5 20")
    assert harness.step() == []
    assert harness.coordinator.has_work
    harness.coordinator.abort("left")
    assert [event.request_id for event in harness.step()] == ["left"]
    harness.grammars.release()
    outputs = harness.run()
    assert (len(outputs["bound"]), outputs["left"]) == (2, [])
    assert harness.final("left").finish_reason == "abort"


def test_without_a_tokenizer_a_grammar_is_refused(make_harness: MakeHarness) -> None:
    executor = make_harness().executor
    coordinator = Coordinator(EngineConfig(model="toy"), Limits(1000, 64, 10), executor)
    with pytest.raises(InputError, match="grammar needs a tokenizer"):
        coordinator.add_request("1", [1], SamplingParams(grammar="5 3"))
    assert not coordinator.has_work


@pytest.mark.parametrize("grammar", [3, "", "  ", "x" * 300_000])
def test_what_is_no_grammar_is_refused_by_name(grammar: Any) -> None:
    with pytest.raises(InputError, match="grammar"):
        SamplingParams(grammar=grammar)
