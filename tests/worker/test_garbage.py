"""Python's garbage collector rests while an engine starts, and is left as it was."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline import LLM
from paceline.coordinator.errors import InputError
from paceline.model.garbage import without_collector
from paceline.worker.worker import Worker


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool, fails: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with contextlib.suppress(InputError), without_collector():
        assert not gc.isenabled()
        if fails:
            raise InputError("no")
    assert gc.isenabled() == enabled


def test_it_rests_while_a_rank_is_made_ready(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up, enabled = Worker._warm_up, []

    def noted(worker: Worker) -> int:
        enabled.append(gc.isenabled())
        return warm_up(worker)

    monkeypatch.setattr(Worker, "_warm_up", noted)
    with LLM(str(tiny("llama").folder), device="cpu"):
        enabled.append(gc.isenabled())
    assert enabled == [False, True]
