"""The life of a rank that does not coordinate: receive a plan, run it, say so."""

from __future__ import annotations

from paceline.coordinator.channel import StepChannelReader
from paceline.coordinator.errors import EngineError
from paceline.coordinator.messages import Shutdown
from paceline.model.errors import CollectiveError
from paceline.worker.memory import MemoryGauge, memory_in_use
from paceline.worker.ranks import RankGroup, describe
from paceline.worker.worker import Worker

WAIT_SECONDS = 1.0
OTHERS_FIRST_SECONDS = 0.5
"""How long a rank whose collective failed keeps that to itself: what broke it is to be told."""
FAREWELL_SECONDS = 5.0
"""After an error rank 0 ends first, within this time: torchrun ends all ranks once one exits, and rank 0 says why."""


def follow(worker: Worker, reader: StepChannelReader, ranks: RankGroup) -> str:
    """Execute plans in order until the coordinator says Shutdown; returns the error that it ended with, if any.

    An error of this rank is reported to the coordinator, which names it, and raised here, unless it is a collective
    that failed: then another rank is gone, of which there is more to tell. Raises EngineError where the coordinator is
    gone.
    """
    memory = MemoryGauge(lambda: memory_in_use(ranks.device))
    try:
        while True:
            reader.report_memory(memory.read())
            message = reader.receive(WAIT_SECONDS)
            if message is None:
                continue
            if isinstance(message, Shutdown):
                break
            # Nothing of the result is read here: rank 0 has the same ids.
            worker.follow(message)
            reader.acknowledge(message.step)
    except Exception as error:
        last = _shutdown_that_came(reader)
        if last is None:
            if isinstance(error, CollectiveError):
                return _leave_after(error, reader, ranks)
            reader.report_error(describe(error))
            ranks.abandon()
            reader.await_writer_end(FAREWELL_SECONDS)
            raise
        message = last  # rank 0 left in the middle of this step, which is what broke it here
    if message.error:
        reader.await_writer_end(FAREWELL_SECONDS)
    return message.error


def _leave_after(error: CollectiveError, reader: StepChannelReader, ranks: RankGroup) -> str:
    """Leave in a step that another rank broke; the coordinator hears of it where it has not found that one by then."""
    ranks.abandon()
    reader.await_writer_end(OTHERS_FIRST_SECONDS)
    reader.report_error(str(error))
    reader.await_writer_end(FAREWELL_SECONDS)
    return str(error)


def _shutdown_that_came(reader: StepChannelReader) -> Shutdown | None:
    """The coordinator's last word, where it has been said behind plans that are not carried out any more."""
    try:
        while (message := reader.receive(0)) is not None:
            if isinstance(message, Shutdown):
                return message
    except EngineError:  # it ended without one; what failed before is what is told
        return None
    return None
