"""Flattening rows into ids, positions and slots, against a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.prepare_inputs import prepare_inputs_reference, prepare_inputs_triton

Prepare = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@pytest.mark.parametrize("prepare", [prepare_inputs_reference, prepare_inputs_triton])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(
    ("query_lens", "padding"),
    [([1, 1, 1], 0), ([1, 1, 70, 9], 0), ([0, 5, 0, 0, 3], 0), ([1, 1], 6), ([1] * 100, 28), ([130], 0)],
)
def test_every_token_of_every_row(
    prepare: Prepare, query_lens: list[int], padding: int, block_size: int, device: torch.device
) -> None:
    num_slots, num_tokens = 120, sum(query_lens) + padding
    token_table = torch.randint(50000, (num_slots, 200), dtype=torch.int32)
    computed_lens = torch.randint(60, (num_slots,), dtype=torch.int32)
    block_tables = torch.randint(2**26, (num_slots, -(-200 // block_size)), dtype=torch.int32)
    slots = torch.randperm(num_slots)[: len(query_lens)]
    query_start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)

    expected = []
    for slot, query_len in zip(slots.tolist(), query_lens, strict=True):
        for position in range(computed_lens[slot], computed_lens[slot] + query_len):
            block_id = int(block_tables[slot, position // block_size])
            expected.append((int(token_table[slot, position]), position, block_id * block_size + position % block_size))
    expected += [(0, 0, -1)] * padding

    tensors = (tensor.to(device) for tensor in (token_table, computed_lens, block_tables, slots, query_start))
    outputs = prepare(*tensors, num_tokens, block_size)
    assert [output.dtype for output in outputs] == [torch.int64, torch.int32, torch.int64]
    assert list(zip(*(output.tolist() for output in outputs), strict=True)) == expected
