"""The door, the loop, and what comes out of it."""

from __future__ import annotations

import pytest

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.errors import EngineError, InputError
from paceline.coordinator.messages import Limits, StepPlan, StepResult
from paceline.coordinator.policies import POLICIES
from paceline.coordinator.sampling_params import SamplingParams

PROMPT = [11, 12, 13, 14, 15]


@pytest.mark.parametrize("bad", [-1, 1000, 999_999_999, 2**63, 1.5, True, "7", None, [1]])
def test_what_is_no_token_id_is_refused_with_its_position_and_the_limit(make_harness, bad):
    harness = make_harness()
    harness.add("running", PROMPT, max_tokens=4)
    harness.step()
    with pytest.raises(InputError, match=r"position 2 .* 0 to 999"):
        harness.add("bad", [1, 2, bad, 4])
    assert len(harness.run()["running"]) == 4
    harness.add("bad", [0, 999], max_tokens=1)


@pytest.mark.parametrize("prompt", [(65, 66, 67, 68), range(65, 69), b"ABCD"])
def test_any_sequence_of_ids_is_a_prompt(make_harness, toy_answer, prompt):
    harness = make_harness()
    harness.add("a", prompt, max_tokens=3)
    assert harness.run()["a"] == toy_answer([65, 66, 67, 68], 3)


def test_a_prompt_is_what_it_was_when_it_was_given(make_harness, toy_answer):
    harness = make_harness()
    prompt = list(PROMPT)
    harness.add("a", prompt, max_tokens=3)
    prompt[:] = [1, 2]
    assert harness.run()["a"] == toy_answer(PROMPT, 3)


def test_an_empty_prompt_is_refused(make_harness):
    with pytest.raises(InputError, match="empty"):
        make_harness().add("a", [])


def test_a_prompt_leaves_room_for_one_token(make_harness):
    harness = make_harness(max_model_len=40)
    with pytest.raises(InputError, match="has 40 tokens, but max_model_len allows at most 40"):
        harness.add("long", [1] * 40)
    harness.add("fits", [1] * 39)
    assert len(harness.run()["fits"]) == 1
    assert harness.final("fits").finish_reason == "length"


def test_a_request_that_the_blocks_can_never_hold_is_refused(make_harness):
    harness = make_harness(num_blocks=5, block_size=4)
    with pytest.raises(InputError, match=r"num_blocks \* block_size allows at most 20"):
        harness.add("long", [1] * 20)
    harness.add("bounded", [1] * 10, max_tokens=100)
    assert len(harness.run()["bounded"]) == 10
    assert harness.final("bounded").finish_reason == "length"


def test_an_id_can_be_used_again_only_once_it_is_finished(make_harness):
    harness = make_harness()
    harness.add("a", PROMPT, max_tokens=2)
    with pytest.raises(InputError, match="'a' is in use"):
        harness.add("a", PROMPT)
    harness.run()
    harness.answers.clear()
    harness.add("a", PROMPT, max_tokens=3)
    assert len(harness.run()["a"]) == 3


def test_only_one_answer_a_request(make_harness):
    with pytest.raises(InputError, match="n is 2"):
        make_harness().add("a", PROMPT, n=2)


@pytest.mark.parametrize("params", [{"stop_token_ids": [1000]}, {"logit_bias": {1000: 1.0}}])
def test_sampling_rules_stay_in_the_vocabulary(make_harness, params):
    with pytest.raises(InputError, match="names token 1000"):
        make_harness().add("a", PROMPT, **params)


def test_end_of_text_ids_stay_in_the_vocabulary(make_harness):
    with pytest.raises(InputError, match="eos_token_ids names token 1000"):
        make_harness().add("a", PROMPT, eos_token_ids=[1000])


def test_an_unknown_policy_is_refused_with_the_names_there_are(make_harness):
    with pytest.raises(InputError, match="prompts-first, decodes-first, got 'fastest'"):
        make_harness(policy="fastest")


@pytest.mark.parametrize("delay", [0, 1])
def test_an_answer_ends_at_max_tokens(make_harness, toy_answer, delay):
    harness = make_harness(delay=delay)
    harness.add("a", PROMPT, max_tokens=9)
    assert harness.run()["a"] == toy_answer(PROMPT, 9)
    assert harness.final("a").finish_reason == "length"
    assert harness.final("a").stop_token is None
    assert sum(harness.executor.token_counts) == len(PROMPT) + 8  # the last token is not computed


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("where", ["eos_token_ids", "stop_token_ids"])
def test_a_stop_token_ends_the_answer_and_belongs_to_it(make_harness, toy_answer, delay, where):
    answer = toy_answer(PROMPT, 9)
    harness = make_harness(delay=delay)
    harness.add("a", PROMPT, max_tokens=9, **{where: [answer[4]]})
    assert harness.run()["a"] == answer[:5]
    assert (harness.final("a").finish_reason, harness.final("a").stop_token) == ("stop", answer[4])


def test_ignore_eos_goes_on_after_the_models_ids_only(make_harness, toy_answer):
    answer = toy_answer(PROMPT, 9)
    harness = make_harness()
    harness.add("a", PROMPT, max_tokens=9, eos_token_ids=[answer[2]], stop_token_ids=[answer[5]], ignore_eos=True)
    assert harness.run()["a"] == answer[:6]


def test_min_tokens_holds_the_stop_back(make_harness, toy_answer):
    answer = toy_answer(PROMPT, 9)
    harness = make_harness()
    harness.add("first", PROMPT, max_tokens=9, eos_token_ids=[answer[4]], min_tokens=4)
    harness.add("later", PROMPT, max_tokens=9, eos_token_ids=[answer[4]], min_tokens=5)
    outputs = harness.run()
    assert outputs["first"] == answer[:5]
    assert len(outputs["later"]) > 5
    assert answer[4] not in outputs["later"][:5]


def test_a_stop_on_the_last_allowed_token_is_a_stop(make_harness, toy_answer):
    answer = toy_answer(PROMPT, 3)
    harness = make_harness()
    harness.add("a", PROMPT, max_tokens=3, eos_token_ids=[answer[2]])
    harness.run()
    assert harness.final("a").finish_reason == "stop"


def test_logprobs_come_with_their_tokens(make_harness):
    harness = make_harness()
    harness.add("with", PROMPT, max_tokens=5, logprobs=2)
    harness.add("without", PROMPT, max_tokens=5)
    harness.run()
    assert [logprob.chosen for logprob in harness.answers["with"].logprobs] == [
        -float(token) for token in harness.answers["with"].tokens
    ]
    assert harness.answers["without"].logprobs == []


def test_rules_reach_the_slot_resolved(make_harness):
    harness = make_harness()
    harness.add("greedy", PROMPT, temperature=0.7, top_k=1, seed=3, max_tokens=2)
    harness.add("plain", PROMPT, top_k=-1, logit_bias={5: 1}, eos_token_ids=[9], stop_token_ids=[8, 9], max_tokens=2)
    harness.add("drawn", PROMPT, seed=None, max_tokens=2)
    harness.add("drawn too", PROMPT, seed=None, max_tokens=2)
    harness.run()
    greedy, plain, drawn, drawn_too = (admission.sampling for admission in harness.executor.admissions)
    assert (greedy.temperature, greedy.seed) == (0.0, 3)
    assert (plain.top_k, plain.logit_bias, plain.stop_ids, plain.logprobs) == (0, ((5, 1.0),), (8, 9), -1)
    assert drawn.seed != drawn_too.seed
    assert all(-(2**63) <= sampling.seed < 2**63 for sampling in (drawn, drawn_too))


def test_times_are_stamped_on_the_last_event(make_harness):
    harness = make_harness(max_batched_tokens=4, max_num_seqs=1, delay=0)
    harness.now = 5.0
    harness.add("a", [1] * 8, max_tokens=3)
    harness.run()
    timings = harness.final("a").timings
    assert (timings.arrived, timings.first_scheduled, timings.first_token, timings.finished) == (5.0, 6.0, 7.0, 9.0)


def test_the_device_has_its_next_step_before_the_last_one_is_awaited(make_harness):
    harness = make_harness(delay=1)
    harness.add("a", PROMPT, max_tokens=10)
    harness.run()
    assert harness.executor.most_in_flight == 2
    assert len(harness.executor.plans) == 10


def test_an_executor_that_computes_at_once_wastes_no_step_on_a_stop(make_harness, toy_answer):
    answer = toy_answer(PROMPT, 5)
    harness = make_harness(delay=0)
    harness.add("a", PROMPT, max_tokens=50, eos_token_ids=[answer[4]])
    first = harness.step()
    assert [list(event.token_ids) for event in first] == [answer[:1]]  # in the same call, not one later
    harness.run()
    assert len(harness.executor.plans) == 5


def test_what_stopped_is_dropped_from_the_step_behind(make_harness, toy_answer):
    answer = toy_answer(PROMPT, 5)
    harness = make_harness(delay=1)
    harness.add("a", PROMPT, max_tokens=50, eos_token_ids=[answer[4]])
    assert harness.run()["a"] == answer
    assert len(harness.executor.plans) == 6


def test_a_result_that_came_between_calls_is_read_before_the_next_plan(make_harness, toy_answer):
    harness = make_harness(delay=1)
    harness.add("a", PROMPT, max_tokens=50, eos_token_ids=toy_answer(PROMPT, 1))
    assert harness.step() == []
    harness.executor.delay = lambda: 0
    assert [event.finish_reason for event in harness.step()] == ["stop"]
    assert len(harness.executor.plans) == 1


def test_news_is_not_held_back_to_wait_for_the_device(make_harness):
    harness = make_harness(delay=9)
    harness.add("a", PROMPT, max_tokens=50)
    harness.add("b", PROMPT, max_tokens=50)
    harness.step()
    harness.coordinator.abort("a")
    assert [event.request_id for event in harness.step()] == ["a"]
    assert harness.executor.num_waits == 0
    harness.step()
    assert harness.executor.num_waits == 1


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("steps", range(12))
def test_an_aborted_request_has_one_last_event_and_gives_everything_back(make_harness, toy_answer, delay, steps):
    """Field report B31: aborted twice, and aborting what is not there."""
    prompt = [7] * 20
    harness = make_harness(delay=delay, max_batched_tokens=8)
    harness.add("a", prompt, max_tokens=8)
    for _ in range(steps):
        harness.step()
    finished = harness.answers["a"].final is not None
    harness.coordinator.abort("a", "stop")
    harness.coordinator.abort("a")
    harness.coordinator.abort("nobody")
    assert harness.run()["a"] == toy_answer(prompt, 8)[: len(harness.answers["a"].tokens)]
    assert harness.final("a").finish_reason == ("length" if finished else "stop")
    assert harness.coordinator.stats().finished == {"length" if finished else "stop": 1}


def test_an_abort_is_news_even_when_nothing_runs(make_harness):
    harness = make_harness()
    harness.add("a", PROMPT)
    harness.coordinator.abort("a")
    assert harness.coordinator.has_work
    (event,) = harness.step()
    assert (event.finish_reason, event.token_ids, event.timings.first_scheduled) == ("abort", (), None)
    assert not harness.coordinator.has_work
    assert harness.executor.plans == []
    assert harness.step() == []


def test_an_id_used_again_after_an_abort_does_not_get_old_tokens(make_harness, toy_answer):
    harness = make_harness(delay=1)
    harness.add("a", PROMPT, max_tokens=9)
    harness.step()
    harness.step()
    harness.coordinator.abort("a")
    del harness.answers["a"]
    harness.add("a", [3, 2, 1], max_tokens=4)
    events = []
    while harness.coordinator.has_work:
        events += harness.coordinator.step()
    old, *new = events
    assert old.finish_reason == "abort"
    assert [token for event in new for token in event.token_ids] == toy_answer([3, 2, 1], 4)


def test_stats_add_up(make_harness):
    harness = make_harness()
    for name in "abc":
        harness.add(name, [ord(name)] * 10, max_tokens=6)
    harness.coordinator.abort("c")
    harness.step()
    stats = harness.coordinator.stats()
    assert (stats.running, stats.waiting) == (2, 0)
    harness.run()
    harness.add("a again", [ord("a")] * 10, max_tokens=6)
    harness.run()
    stats = harness.coordinator.stats()
    assert (stats.running, stats.waiting, stats.blocks.used) == (0, 0, 0)
    assert stats.finished == {"abort": 1, "length": 3}
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generated_tokens) == (30, 8, 18)
    assert stats.steps == len(harness.executor.plans)
    assert harness.final("a again").cached_tokens == 8


def test_a_policy_that_lets_nothing_run_is_an_error_and_no_idle_loop(make_harness, monkeypatch):
    class Stingy:
        def prompt_budget(self, budget: int, num_decodes: int) -> int:
            return 0

    monkeypatch.setitem(POLICIES, "stingy", Stingy())
    harness = make_harness(policy="stingy")
    harness.add("a", PROMPT)
    with pytest.raises(EngineError, match="no request can go on"):
        harness.step()


class Broken:
    """Executes nothing, and answers what it is told to."""

    def __init__(self, result: StepResult | EngineError) -> None:
        self.result = result

    def submit(self, plan: StepPlan) -> None:
        pass

    def collect(self, wait: bool) -> StepResult | None:
        if isinstance(self.result, EngineError):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (EngineError("rank 1 died"), "rank 1 died"),
        (StepResult(1, [5]), "answered step 1"),
        (StepResult(0, [5, 6]), "with 2 tokens, but step 0 samples 1"),
        (StepResult(0, [1000]), "sampled token 1000"),
        (StepResult(0, [-1]), "sampled token -1"),
    ],
)
def test_a_failed_or_wrong_answer_of_the_ranks_ends_the_loop(result, message):
    coordinator = Coordinator(EngineConfig(model="toy"), Limits(1000, 100, 100), Broken(result))
    coordinator.add_request("a", PROMPT, SamplingParams())
    with pytest.raises(EngineError, match=message):
        coordinator.step()
