"""The life of a rank that does not coordinate: receive a plan, run it, say so."""

from __future__ import annotations

import contextlib
import time

from paceline.coordinator.channel import StepChannelReader
from paceline.coordinator.errors import EngineError
from paceline.coordinator.messages import Shutdown
from paceline.worker.ranks import RankGroup, describe
from paceline.worker.worker import Worker

WAIT_SECONDS = 1.0
FAREWELL_SECONDS = 5.0


def follow(worker: Worker, reader: StepChannelReader, ranks: RankGroup) -> None:
    """Execute plans in order until the coordinator says Shutdown.

    An error is reported to the coordinator, which names this rank, and raised here. Raises EngineError where the
    coordinator ended with an error or is gone.
    """
    try:
        while True:
            message = reader.receive(WAIT_SECONDS)
            if message is None:
                continue
            if isinstance(message, Shutdown):
                break
            # Nothing of the result is read here: rank 0 has the same ids.
            worker.execute(message)
            reader.acknowledge(message.step)
    except Exception as error:
        reader.report_error(describe(error))
        ranks.abandon()
        _await_end(reader)
        raise
    if message.error:
        raise EngineError(message.error)


def _await_end(reader: StepChannelReader) -> None:
    """Stay until rank 0 has read the report and ended: torchrun ends all ranks once one of them exits."""
    deadline = time.monotonic() + FAREWELL_SECONDS
    with contextlib.suppress(EngineError):  # raised when rank 0 is gone, which is what is waited for
        while time.monotonic() < deadline and not isinstance(reader.receive(WAIT_SECONDS), Shutdown):
            pass
