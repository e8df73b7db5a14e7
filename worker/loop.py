"""The life of a rank that does not coordinate: receive a plan, run it, say so."""

from __future__ import annotations

from paceline.coordinator.channel import StepChannelReader
from paceline.coordinator.errors import EngineError
from paceline.coordinator.messages import Shutdown
from paceline.worker.ranks import describe
from paceline.worker.worker import Worker

WAIT_SECONDS = 1.0


def follow(worker: Worker, reader: StepChannelReader) -> None:
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
        raise
    if message.error:
        raise EngineError(message.error)
