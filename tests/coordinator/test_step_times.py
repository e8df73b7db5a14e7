"""What is measured of every step: where the host's time goes, and how large steps are."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.distribution import Distribution
from paceline.coordinator.events import RankState
from paceline.coordinator.messages import Limits, StepPlan, StepResult
from paceline.coordinator.sampling_params import SamplingParams


def test_a_value_falls_into_the_first_bucket_that_holds_it() -> None:
    distribution = Distribution((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 5.1, 100):
        distribution.add(value)
    assert distribution.counts == [2, 2, 1, 2]
    distribution.add(3, times=4)
    assert (distribution.counts, distribution.count, distribution.sum) == ([2, 2, 5, 2], 11, 126.6)
    before = distribution.copy()
    distribution.add(1)
    assert (before.count, before.sum) == (11, 126.6)


class TimedExecutor:
    """Takes a second to launch a step, and two for its result to come; time passes nowhere else."""

    def __init__(self) -> None:
        self.now = 0.0
        self._results: list[StepResult] = []

    def submit(self, plan: StepPlan) -> None:
        self.now += 1
        assert plan.rows is None or plan.rows.samples
        self._results.append(StepResult(plan.step, [7]))

    def collect(self, wait: bool) -> StepResult | None:
        if not wait:
            return None
        self.now += 2
        return self._results.pop(0)

    def rank_states(self) -> Sequence[RankState]:
        return [RankState(0, 1, 2, 3, 4, 5, 0.0, len(self._results))]


def test_each_part_of_a_step_is_measured_once_a_step() -> None:
    executor = TimedExecutor()
    config = EngineConfig(model="", block_size=4, num_blocks=8)
    limits = Limits(vocab_size=100, max_model_len=32, num_blocks=8)
    coordinator = Coordinator(config, limits, executor, clock=lambda: executor.now)
    coordinator.add_request("a", [1, 2, 3], SamplingParams(max_tokens=5))
    while coordinator.has_work:
        coordinator.step()
    stats = coordinator.stats()
    seconds = {name: (part.count, part.sum) for name, part in stats.step_seconds.items()}
    assert seconds == {"plan": (5, 0), "launch": (5, 5), "wait": (5, 10), "apply": (5, 0), "deliver": (0, 0)}
    assert (stats.step_requests.count, stats.step_requests.sum) == (5, 5)
    assert (stats.step_tokens.count, stats.step_tokens.sum) == (5, 3 + 4)
    assert stats.ranks == [RankState(0, 1, 2, 3, 4, 5, 0.0, 0)]


def test_sizes_of_steps_are_those_of_the_plans(make_harness) -> None:
    harness = make_harness()
    for name in "abc":
        harness.add(name, [ord(name)] * 10, max_tokens=6)
    harness.run()
    stats = harness.coordinator.stats()
    assert stats.step_tokens.count == stats.step_requests.count == stats.steps
    assert stats.step_tokens.sum == sum(harness.executor.token_counts)
    assert stats.step_requests.sum == sum(len(rows.slots) for rows in harness.executor.rows)
