"""Buffers for pieces: apart from each other, fit for any type, and as large as a piece of unusual size needs."""

from __future__ import annotations

import pytest
import torch

from paceline.model import staging
from paceline.model.staging import PIECE_BYTES, SPARE_BUFFERS, StagingMemory, num_readers


@pytest.mark.parametrize("size", [10, 1 << 12, PIECE_BYTES, PIECE_BYTES + 2])
def test_buffers_do_not_overlap_and_hold_any_type(size: int) -> None:
    buffers = [buffer.result() for buffer in StagingMemory(torch.device("cpu"), 3).buffers(size)]
    assert len(buffers) == 3 + SPARE_BUFFERS
    for number, buffer in enumerate(buffers):
        assert len(buffer) >= size
        buffer[:8].view(torch.float64).fill_(number)
        buffer[8:size].fill_(number)
    for number, buffer in enumerate(buffers):
        assert buffer[:8].view(torch.float64).item() == number
        assert buffer[8:size].eq(number).all()


@pytest.mark.parametrize(("ranks", "readers"), [(1, 12), (2, 12), (4, 8), (64, 1)])
def test_ranks_share_the_processors(ranks: int, readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.os, "sched_getaffinity", lambda _: set(range(32)))
    assert num_readers(ranks) == readers


@pytest.mark.gpu
def test_buffers_for_a_gpu_are_pinned_as_long_as_they_are_used() -> None:
    with StagingMemory(torch.device("cuda"), 2) as memory:
        buffers = [buffer.result() for size in (PIECE_BYTES, PIECE_BYTES + 2) for buffer in memory.buffers(size)]
        assert all(buffer.is_pinned() for buffer in buffers)
    memory._worker.shutdown()
    assert not any(buffer.is_pinned() for buffer in buffers)
