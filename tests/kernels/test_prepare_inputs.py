"""Flattening rows into ids, positions and slots, against a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.prepare_inputs import StepInputs, prepare_inputs_reference, prepare_inputs_triton

Prepare = Callable[..., StepInputs]


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
    slots = torch.randperm(num_slots, dtype=torch.int32)[: len(query_lens)]
    query_start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)

    expected = []
    for slot, query_len in zip(slots.tolist(), query_lens, strict=True):
        for position in range(computed_lens[slot], computed_lens[slot] + query_len):
            block_id = int(block_tables[slot, position // block_size])
            expected.append((int(token_table[slot, position]), position, block_id * block_size + position % block_size))
    expected += [(0, 0, -1)] * padding

    tensors = (tensor.to(device) for tensor in (token_table, computed_lens, block_tables, slots, query_start))
    outputs = prepare(*tensors, num_tokens, block_size)
    assert [output.dtype for output in outputs] == [torch.int64, torch.int32, torch.int64, torch.int32, torch.int64]
    tokens = (outputs.input_ids, outputs.positions, outputs.slot_mapping)
    assert list(zip(*(output.tolist() for output in tokens), strict=True)) == expected
    assert outputs.seq_lens.tolist() == (computed_lens[slots] + torch.tensor(query_lens)).tolist()
    assert outputs.last_tokens.tolist() == (query_start[1:] - 1).tolist()


@pytest.mark.parametrize("prepare", [prepare_inputs_reference, prepare_inputs_triton])
def test_padding_rows_run_nothing(prepare: Prepare, device: torch.device) -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables = torch.ones(2, 8, dtype=torch.int32, device=device), ints(3, 5), ints(7, 9)[:, None]
    outputs = prepare(*tables, ints(1, -1, -1), ints(0, 1, 1, 1), 3, 16)
    assert outputs.slot_mapping.tolist() == [9 * 16 + 5, -1, -1]
    assert outputs.seq_lens.tolist() == [6, 0, 0]
    assert outputs.last_tokens.tolist() == [0, 0, 0]
