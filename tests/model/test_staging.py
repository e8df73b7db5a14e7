"""Buffers for pieces: apart from each other, fit for any type, and as large as a piece of unusual size needs."""

from __future__ import annotations

import pytest
import torch

from paceline.model.staging import PIECE_BYTES, SPARE_BUFFERS, StagingMemory, num_readers


@pytest.mark.parametrize("size", [10, 1 << 12, PIECE_BYTES, PIECE_BYTES + 2])
def test_buffers_do_not_overlap_and_hold_any_type(size: int) -> None:
    buffers = [buffer.result() for buffer in StagingMemory(torch.device("cpu")).buffers(size)]
    assert len(buffers) == num_readers() + SPARE_BUFFERS
    for number, buffer in enumerate(buffers):
        assert len(buffer) >= size
        buffer[:8].view(torch.float64).fill_(number)
        buffer[8:size].fill_(number)
    for number, buffer in enumerate(buffers):
        assert buffer[:8].view(torch.float64).item() == number
        assert buffer[8:size].eq(number).all()


@pytest.mark.gpu
def test_buffers_for_a_gpu_are_pinned() -> None:
    assert all(buffer.result().is_pinned() for buffer in StagingMemory(torch.device("cuda")).buffers(PIECE_BYTES))
