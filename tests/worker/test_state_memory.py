"""A rank's tables in one piece of memory, and what the host writes to them."""

from __future__ import annotations

from array import array

import pytest
import torch

from paceline.kernels.store_runs import store_runs_triton
from paceline.worker.state_memory import StateMemory
from paceline.worker.upload import float_bits, long_bits

SHAPES = [(3, 50), (2, 3), (70,), (4, 2)]


def test_the_tensors_are_zeros_that_share_no_word_and_begin_at_even_places() -> None:
    memory = StateMemory(SHAPES, torch.device("cpu"))
    assert [tuple(tensor.shape) for tensor in memory.tensors] == SHAPES
    for index, tensor in enumerate(memory.tensors):
        assert torch.equal(tensor, torch.zeros_like(tensor))
        assert tensor.is_contiguous()
        assert tensor.storage_offset() % 64 == 0
        tensor.fill_(index + 1)
    for index, tensor in enumerate(memory.tensors):
        assert torch.equal(tensor, torch.full_like(tensor, index + 1))
    assert memory.nbytes >= 4 * (150 + 6 + 70 + 8)


def test_what_is_written_is_there_once_it_is_stored() -> None:
    memory = StateMemory(SHAPES, torch.device("cpu"))
    rows, few, flat, pairs = memory.tensors
    memory.write(0, 50, range(1, 51))
    memory.write(1, 4, float_bits([1.5]))
    memory.write(3, 2, long_bits(-(2**62) + 5))
    memory.write(2, 69, (7,))
    memory.write(2, 0, ())
    assert not any(tensor.any() for tensor in memory.tensors)
    memory.store()
    assert rows.tolist() == [[0] * 50, [*range(1, 51)], [0] * 50]
    assert few.view(torch.float32).tolist() == [[0, 0, 0], [0, 1.5, 0]]
    assert flat.tolist() == [0] * 69 + [7]
    assert pairs.view(torch.int64).view(-1).tolist() == [0, -(2**62) + 5, 0, 0]
    memory.write_apart(0, 1, 50, (70, 80))
    memory.write(2, 0, array("i", [9]))
    memory.store()
    memory.store()
    assert flat.tolist() == [9] + [0] * 68 + [7]
    assert rows.tolist() == [[0, 70, *[0] * 48], [1, 80, *range(3, 51)], [0] * 50]


def test_values_apart_alone_are_stored_by_the_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.worker.state_memory.store_runs", store_runs_triton)
    memory = StateMemory(SHAPES, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    memory.write_apart(1, 2, 3, float_bits([1.5, 2.5]))
    memory.store()
    assert memory.tensors[1].view(torch.float32).tolist() == [[0, 0, 1.5], [0, 0, 2.5]]
