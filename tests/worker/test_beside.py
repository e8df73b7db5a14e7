"""What a rank does beside the phases of its start: its result is waited for, and its error is a phase's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.errors import InputError
from paceline.model.errors import LoadingStopped
from paceline.worker.ranks import RankGroup

ENDLESS_S = 60


@pytest.fixture
def ranks() -> RankGroup:
    return RankGroup(EngineConfig(model="", device="cpu"), environment={})


def failing(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_its_result_is_there_for_a_later_phase(ranks: RankGroup) -> None:
    go_on = threading.Event()
    working = ranks.beside(lambda: go_on.wait(ENDLESS_S))
    with ranks.together() as stop:
        go_on.set()
    with ranks.together():
        assert working.result()
    assert not stop.is_set()


def test_its_error_stops_the_phase_in_which_it_comes(ranks: RankGroup) -> None:
    go_on = threading.Event()

    def work() -> None:
        go_on.wait(ENDLESS_S)
        raise InputError("the tokenizer is no good")

    ranks.beside(work)
    with pytest.raises(InputError, match=r"^the tokenizer is no good$"), ranks.together() as stop:
        go_on.set()
        deadline = time.monotonic() + ENDLESS_S
        while not stop.is_set() and time.monotonic() < deadline:
            time.sleep(0.001)
        raise LoadingStopped


def test_its_error_stops_the_next_phase_where_none_runs(ranks: RankGroup) -> None:
    ranks.beside(failing(InputError("the tokenizer is no good"))).exception()
    with pytest.raises(InputError, match=r"^the tokenizer is no good$"), ranks.together() as stop:
        assert stop.is_set()


def test_a_phase_that_waits_for_it_has_its_error(ranks: RankGroup) -> None:
    working = ranks.beside(failing(ImportError("no module named transformers")))
    with pytest.raises((InputError, ImportError), match="no module named transformers"), ranks.together():
        working.result()


def test_a_phases_own_error_comes_first(ranks: RankGroup) -> None:
    ranks.beside(failing(InputError("the tokenizer is no good"))).exception()
    with pytest.raises(InputError, match=r"^a tensor is missing$"), ranks.together():
        raise InputError("a tensor is missing")
