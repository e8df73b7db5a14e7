"""What somebody who watches is shown."""

from __future__ import annotations

from paceline.coordinator.block_manager import CACHED, FREE, SHARED
from paceline.coordinator.view import MOST_WAITING_SHOWN, STEPS_REMEMBERED

PREFIX = [1] * 8


def test_a_view_shows_requests_blocks_and_steps(make_harness):
    harness = make_harness(num_blocks=10, block_size=4, max_num_seqs=2, delay=0)
    for name, last in (("a", 2), ("b", 3), ("c", 4)):
        harness.add(name, [*PREFIX, last], max_tokens=6)
    for _ in range(3):  # c waits for a slot, b for the prefix that a computes first
        harness.step()
    view = harness.coordinator.view()
    assert view.stats == harness.coordinator.stats()
    shown = [(line.id, line.prompt_tokens, line.cached_tokens, line.generated_tokens) for line in view.requests]
    assert shown == [("a", 9, 0, 3), ("b", 9, 8, 2), ("c", 9, 0, 0)]
    slots = [line.slot for line in view.requests]
    assert slots[2] == -1
    assert [line.blocks for line in view.requests] == [3, 3, 0]
    assert [line.computed_tokens for line in view.requests] == [11, 10, 0]
    assert all(line.seconds >= 0 for line in view.requests)
    assert sorted(view.block_holders) == sorted([SHARED] * 2 + slots[:2] + [FREE] * 6)
    assert [step[:1] + step[2:] for step in view.steps] == [(0, 1, 9, 0), (1, 2, 1, 1), (2, 2, 0, 2)]
    assert [step.planned for step in view.steps] == sorted(step.planned for step in view.steps)
    harness.run()
    after = harness.coordinator.view()
    assert list(after.requests) == []
    assert {*after.block_holders} == {FREE, CACHED}
    assert len(view.steps) == 3  # the one taken before stays as it was
    assert sorted(view.block_holders) == sorted([SHARED] * 2 + slots[:2] + [FREE] * 6)


def test_a_view_is_of_bounded_size(make_harness):
    harness = make_harness(max_num_seqs=1, max_model_len=700)
    for number in range(MOST_WAITING_SHOWN + 40):
        harness.add(f"{number}", [1, 2, 3], max_tokens=STEPS_REMEMBERED + 50)
    while harness.coordinator.stats().steps < STEPS_REMEMBERED + 20:
        harness.step()
    view = harness.coordinator.view()
    assert [line.id for line in view.requests] == [f"{number}" for number in range(MOST_WAITING_SHOWN + 1)]
    assert view.stats.waiting == MOST_WAITING_SHOWN + 39
    assert [step.step for step in view.steps] == list(range(20, 20 + STEPS_REMEMBERED))
