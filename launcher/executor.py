"""Running the coordinator's plans on all ranks of this host."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

from paceline.coordinator.channel import StepChannelWriter
from paceline.coordinator.errors import EngineError
from paceline.coordinator.events import RankState
from paceline.coordinator.messages import Shutdown, StepPlan, StepResult
from paceline.worker.memory import MemoryGauge, RankMemory, memory_in_use
from paceline.worker.pending import PendingResult
from paceline.worker.ranks import describe
from paceline.worker.worker import Worker

POLL_SECONDS = 50e-6
BLAME_SECONDS = 2.0


class RankExecutor:
    """Rank 0's own worker, called directly, and a channel to the others (None where there are none)."""

    def __init__(self, worker: Worker, channel: StepChannelWriter | None, memories: Sequence[RankMemory]) -> None:
        """memories: what each rank has set aside, in order."""
        self._worker = worker
        self._channel = channel
        self._memories = memories
        self._memory = MemoryGauge(lambda: memory_in_use(worker.state.device))
        self._steps = 0
        self._pending: deque[PendingResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Send the plan to the other ranks and start it here."""
        if self._channel is not None:
            self.check_ranks()
            self._channel.send(plan)
        with self._blaming():
            self._pending.append(self._worker.execute(plan))
        self._steps = plan.step + 1

    def collect(self, wait: bool) -> StepResult | None:
        """The oldest result not yet collected; None where it is not ready and wait is false, or nothing runs.

        Raises EngineError naming the rank that failed.
        """
        if not self._pending:
            return None
        with self._blaming():
            pending = self._pending[0]
            if not pending.ready():
                if not wait:
                    return None
                self._wait(pending)
            self._pending.popleft()
            return pending.result()

    def _wait(self, pending: PendingResult) -> None:
        """Wait for a result while watching the other ranks: a collective does not end when one of them is gone."""
        if self._channel is None:
            return
        while not pending.ready():
            self._channel.check_readers()
            time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        """Whatever a step meets here is an EngineError that names the rank at fault.

        Another rank's death shows as a broken collective, on a GPU only when the result is looked at: so it is let say
        first what it met.
        """
        try:
            yield
        except EngineError:
            raise
        except Exception as error:
            deadline = time.monotonic() + BLAME_SECONDS
            while self._channel is not None and time.monotonic() < deadline:
                self.check_ranks()
                time.sleep(0.05)
            raise EngineError(f"rank 0 failed: {describe(error)}") from error

    def check_ranks(self) -> None:
        """Raise EngineError naming another rank that died or failed."""
        if self._channel is not None:
            self._channel.check_readers()

    def rank_states(self) -> Sequence[RankState]:
        """What is known of every rank now, in order; of the others what they last wrote, so that none is asked."""
        signs = [(self._memory.read(), 0.0, self._steps)]
        if self._channel is not None:
            signs += [(each.memory_used, each.silence, each.acknowledged + 1) for each in self._channel.statuses]
        return [
            RankState(
                rank=rank,
                weights_bytes=memory.weights,
                cache_bytes=memory.cache,
                workspace_bytes=memory.workspace,
                memory_total=memory.total,
                memory_used=used,
                silence=silence,
                steps=steps,
            )
            # Once this is closed there is nobody but rank 0.
            for rank, (memory, (used, silence, steps)) in enumerate(zip(self._memories, signs, strict=False))
        ]

    def close(self, error: str = "") -> None:
        """End the other ranks; with an error they exit non-zero, once this process has ended."""
        if self._channel is not None:
            with contextlib.suppress(EngineError):  # a rank that is gone cannot be told
                self._channel.send(Shutdown(error))
            self._channel.close()
            self._channel = None
