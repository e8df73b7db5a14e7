"""What the coordinator needs of whatever runs its plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.coordinator.events import RankState
from paceline.coordinator.messages import StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in order; results come back in the same order."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step on every rank, without waiting for it where the device is asynchronous."""

    def collect(self, wait: bool) -> StepResult | None:
        """The oldest result not yet collected; None where it is not ready and wait is false.

        Raises EngineError where a rank failed.
        """

    def rank_states(self) -> Sequence[RankState]:
        """What is known of every rank now, in order."""
