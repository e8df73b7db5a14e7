"""What each step computes: chunks, admissions, prefix hits, preemption. The worker of the harness checks the rest."""

from __future__ import annotations

import pytest

from paceline.coordinator.policies import POLICIES


def counts(harness) -> list[list[int]]:
    return [list(rows.counts) for rows in harness.executor.rows]


@pytest.mark.parametrize(("budget", "chunks"), [(4, [4, 4, 2]), (5, [5, 5]), (9, [9, 1]), (10, [10]), (32, [10])])
def test_a_prompt_is_cut_to_the_budget(make_harness, toy_answer, budget, chunks):
    harness = make_harness(max_batched_tokens=budget)
    prompt = list(range(10))
    harness.add("a", prompt, max_tokens=3)
    assert harness.run()["a"] == toy_answer(prompt, 3)
    assert counts(harness) == [*([chunk] for chunk in chunks), [1], [1]]
    assert [list(rows.samples) for rows in harness.executor.rows] == [
        [False] * (index < len(chunks) - 1) or [True] for index in range(len(chunks) + 2)
    ]


def test_prompts_first_gives_prompts_what_the_answers_leave(make_harness):
    harness = make_harness(max_batched_tokens=16)
    for name in "abc":
        harness.add(name, [ord(name)], max_tokens=10)
    harness.step()
    harness.add("long", list(range(30)), max_tokens=2)
    harness.run()
    assert counts(harness)[:4] == [[1, 1, 1], [1, 1, 1, 13], [1, 1, 1, 13], [1, 1, 1, 4]]


def test_decodes_first_gives_prompts_a_quarter_while_answers_run(make_harness):
    harness = make_harness(max_batched_tokens=16, policy="decodes-first")
    harness.add("short", [1], max_tokens=4)
    harness.step()
    harness.add("long", list(range(30)), max_tokens=2)
    harness.run()
    assert counts(harness)[:5] == [[1], [1, 4], [1, 4], [1, 4], [16]]


def test_a_policy_may_halt_a_prompt_half_way(make_harness, toy_answer, monkeypatch):
    class Alternating:
        turn = 0

        def prompt_budget(self, budget: int, num_decodes: int) -> int:
            self.turn += 1
            return 5 * (self.turn % 2)

    monkeypatch.setitem(POLICIES, "alternating", Alternating())
    harness = make_harness(policy="alternating")
    harness.add("short", [1], max_tokens=9)
    harness.add("long", list(range(12)), max_tokens=2)
    assert harness.run() == {"short": toy_answer([1], 9), "long": toy_answer(range(12), 2)}
    assert counts(harness)[:6] == [[1, 4], [1], [1, 5], [1], [1, 3], [1, 1]]


def test_more_requests_than_slots_wait_their_turn(make_harness, toy_answer):
    harness = make_harness(max_num_seqs=3)
    for index in range(10):
        harness.add(str(index), [index] * 5, max_tokens=4)
    assert harness.run() == {str(index): toy_answer([index] * 5, 4) for index in range(10)}
    assert max(len(rows.slots) for rows in harness.executor.rows) == 3
    assert [admission.token_ids[0] for admission in harness.executor.admissions] == list(range(10))


def test_no_more_requests_run_than_the_budget_has_tokens(make_harness):
    harness = make_harness(max_num_seqs=8, max_batched_tokens=3)
    for index in range(8):
        harness.add(str(index), [index], max_tokens=5)
    harness.run()
    assert max(len(rows.slots) for rows in harness.executor.rows) == 3


def test_low_priority_numbers_are_admitted_first(make_harness):
    harness = make_harness(max_num_seqs=1)
    harness.add("usual", [1], max_tokens=2)
    harness.add("late", [2], max_tokens=2, priority=5)
    harness.add("urgent", [3], max_tokens=2, priority=-1)
    harness.run()
    assert [admission.token_ids[0] for admission in harness.executor.admissions] == [3, 1, 2]


def test_a_steady_step_says_nothing_but_new_blocks(make_harness):
    harness = make_harness(block_size=8)
    harness.add("a", [1] * 3, max_tokens=15)
    harness.add("b", [2] * 4, max_tokens=15)
    harness.run()
    steady = harness.executor.plans[2:-1]
    assert len(steady) == 12
    assert all(plan.rows is None and not plan.freed and not plan.admissions for plan in steady)
    assert [len(plan.block_appends) for plan in steady] == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_a_prompt_sent_twice_is_found_but_for_one_token(make_harness, delay, length, cached):
    harness = make_harness(delay=delay)
    prompt = list(range(length))
    harness.add("first", prompt, max_tokens=8)
    harness.run()
    harness.add("second", prompt, max_tokens=8)
    harness.run()
    harness.add("third", prompt, max_tokens=8)
    harness.add("fourth", prompt, max_tokens=8)
    outputs = harness.run()
    assert outputs["first"] == outputs["second"] == outputs["third"] == outputs["fourth"]
    assert [harness.final(name).cached_tokens for name in ("first", "second", "third", "fourth")] == [0] + [cached] * 3


def test_prefix_cache_off_finds_nothing(make_harness):
    harness = make_harness(prefix_cache=False)
    for name in "ab":
        harness.add(name, [1] * 20, max_tokens=8)
        harness.run()
    assert harness.final("b").cached_tokens == 0
    assert harness.coordinator.stats().blocks.cached == 0


def test_answers_are_found_as_the_beginning_of_the_next_turn(make_harness, toy_answer):
    prompt = list(range(10))
    harness = make_harness()
    harness.add("turn 1", prompt, max_tokens=9)
    answer = harness.run()["turn 1"]
    harness.add("turn 2", [*prompt, *answer, 7], max_tokens=2)
    assert harness.run()["turn 2"] == toy_answer([*prompt, *answer, 7], 2)
    assert harness.final("turn 2").cached_tokens == 16  # the answer's last token was never computed


def test_salts_share_no_prefix(make_harness):
    harness = make_harness()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        harness.add(name, [1] * 9, max_tokens=2, cache_salt=salt)
        harness.run()
    assert [harness.final(name).cached_tokens for name in "abc"] == [0, 0, 8]


def test_equal_prompts_that_arrive_together_are_computed_once(make_harness, toy_answer):
    harness = make_harness(max_batched_tokens=64)
    prompt = list(range(21))
    for seed in range(4):
        harness.add(str(seed), prompt, max_tokens=4, seed=seed)
    assert harness.run() == {str(seed): toy_answer(prompt, 4, seed=seed) for seed in range(4)}
    assert [harness.final(str(seed)).cached_tokens for seed in range(4)] == [0, 20, 20, 20]
    assert counts(harness)[:2] == [[21], [1, 1, 1, 1]]


def test_a_prefix_is_shared_while_its_first_reader_is_still_in_its_prompt(make_harness):
    harness = make_harness(max_batched_tokens=16)
    harness.add("long", list(range(60)), max_tokens=2)
    harness.step()
    harness.step()
    harness.add("short", list(range(30)), max_tokens=2)
    harness.run()
    assert harness.final("short").cached_tokens == 28


def test_colliding_hashes_change_no_answer(make_harness, toy_answer, monkeypatch):
    monkeypatch.setattr("paceline.coordinator.prefix_cache.secret_digest", lambda: lambda data: b"always the same")
    harness = make_harness()
    prompts = {str(index): [index % 3] * 8 + [index % 2] * 6 for index in range(12)}
    for name, prompt in prompts.items():
        harness.add(name, prompt, max_tokens=6)
        harness.step()
    assert harness.run() == {name: toy_answer(prompt, 6) for name, prompt in prompts.items()}


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_requests_answer_as_if_nothing_had_happened(make_harness, toy_answer, delay, prefix_cache):
    # Eight requests of 64 + 64 tokens need 256 blocks of 4 at their longest; there are fewer.
    prompts = {str(index): [index + 1] * 64 for index in range(8)}
    harness = make_harness(num_blocks=180, delay=delay, prefix_cache=prefix_cache, max_batched_tokens=64)
    for name, prompt in prompts.items():
        harness.add(name, prompt, max_tokens=64, seed=int(name))
    outputs = harness.run()
    assert harness.coordinator.stats().preemptions > 0
    assert outputs == {name: toy_answer(prompt, 64, seed=int(name)) for name, prompt in prompts.items()}
    assert all(harness.final(name).num_prompt_tokens == 64 for name in prompts)
    assert all(harness.final(name).cached_tokens == 0 for name in prompts)  # hits after preemption are not the user's
    again = [admission for admission in harness.executor.admissions if len(admission.token_ids) > 64]
    assert len(again) == harness.coordinator.stats().preemptions
    assert all(admission.prompt_len == 64 for admission in again)
    assert any(admission.num_computed > 64 for admission in again) == prefix_cache


def test_one_request_may_be_preempted_again_and_again(make_harness, toy_answer):
    harness = make_harness(num_blocks=24, max_model_len=96, max_num_seqs=4)
    for index in range(4):
        harness.add(str(index), [index] * 4, max_tokens=60, seed=index)
    assert harness.run() == {str(index): toy_answer([index] * 4, 60, seed=index) for index in range(4)}
    histories = [admission.token_ids[0] for admission in harness.executor.admissions]
    assert max(histories.count(index) for index in range(4)) > 2
    assert histories.count(0) == 1, "the oldest is never a victim"


def test_a_newcomer_does_not_take_the_blocks_that_those_who_run_need_next(make_harness):
    harness = make_harness(num_blocks=10)
    harness.add("runs", [1] * 7, max_tokens=4)
    harness.step()
    harness.add("newcomer", [2] * 30, max_tokens=2)  # would fit into the 8 blocks left, without one to spare
    harness.run()
    assert harness.coordinator.stats().preemptions == 0
    assert harness.final("newcomer").timings.first_scheduled >= harness.final("runs").timings.finished


def test_one_preempts_the_last_and_the_next_itself_in_the_same_step(make_harness, toy_answer):
    """Then two fewer run than when the step began."""
    harness = make_harness(num_blocks=12, max_model_len=40)
    requests = {"a": (5, 14, 0), "b": (9, 9, 1), "c": (6, 13, 2), "d": (2, 15, 1)}
    for name, (length, max_tokens, steps) in requests.items():
        harness.add(name, [ord(name) % 50] * length, max_tokens=max_tokens)
        for _ in range(steps):
            harness.step()
    answers = harness.run()
    for name, (length, max_tokens, _) in requests.items():
        assert answers[name] == toy_answer([ord(name) % 50] * length, max_tokens)
    assert harness.coordinator.stats().preemptions >= 2


def test_the_newest_is_preempted_and_the_least_urgent_before_it(make_harness):
    harness = make_harness(num_blocks=16, max_model_len=64)
    harness.add("least urgent", [1] * 4, max_tokens=40, priority=1)
    harness.add("first", [2] * 4, max_tokens=40)
    harness.add("second", [3] * 4, max_tokens=40)
    harness.run()
    readmitted = [admission.token_ids[0] for admission in harness.executor.admissions[3:]]
    finished = sorted(harness.answers, key=lambda name: harness.final(name).timings.finished)
    assert 1 in readmitted
    assert 2 not in readmitted
    assert finished == ["first", "second", "least urgent"]


def test_a_request_alone_uses_every_block(make_harness, toy_answer):
    harness = make_harness(num_blocks=5, max_model_len=100)
    harness.add("a", [1, 2, 3], max_tokens=100)
    harness.add("b", [4, 5, 6], max_tokens=100)
    assert harness.run() == {"a": toy_answer([1, 2, 3], 17), "b": toy_answer([4, 5, 6], 17)}


@pytest.mark.parametrize("delay", [0, 1])
def test_a_request_aborted_while_preempted_ends_once(make_harness, delay):
    harness = make_harness(num_blocks=16, max_model_len=64, delay=delay)
    for index in range(3):
        harness.add(str(index), [index] * 4, max_tokens=40)
    while harness.coordinator.stats().preemptions == 0:
        harness.step()
    harness.coordinator.abort("2")
    harness.run()
    assert harness.final("2").finish_reason == "abort"
    assert harness.coordinator.stats().finished == {"abort": 1, "length": 2}
