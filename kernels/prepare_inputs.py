"""Flatten a step's rows into token ids, positions, cache slots and lengths, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from paceline.kernels.launch import launch

_BLOCK = 64


class StepInputs(NamedTuple):
    """T tokens in R rows."""

    input_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int32."""
    slot_mapping: torch.Tensor
    """[T] int64: block_id * block_size + offset of each token's key and value; -1 for padding."""
    seq_lens: torch.Tensor
    """[R] int32: tokens of each row up to and with this step's; 0 for padding."""
    last_tokens: torch.Tensor
    """[R] int64: which of the T is the last of each row; 0 for padding."""


def prepare_inputs(
    token_table: torch.Tensor,
    computed_lens: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    num_tokens: int,
    block_size: int,
) -> StepInputs:
    """Return the inputs of a step of T = num_tokens tokens.

    Row r is the request in slot s = slots[r]. It runs its tokens from computed_lens[s] on, as many as
    query_start[r + 1] - query_start[r]. A slot of -1 makes a padding row, which runs none; tokens from query_start[R]
    on are padding too: id 0, position 0.

    token_table: [S, P] int32, each slot's known tokens. computed_lens: [S] int32. block_tables: [S, B] int32.
    slots: [R] int32. query_start: [R + 1] int32, from 0. The tables are contiguous.
    """
    run = prepare_inputs_triton if query_start.is_cuda else prepare_inputs_reference
    return run(token_table, computed_lens, block_tables, slots, query_start, num_tokens, block_size)


def prepare_inputs_reference(
    token_table: torch.Tensor,
    computed_lens: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    num_tokens: int,
    block_size: int,
) -> StepInputs:
    """`prepare_inputs` in plain PyTorch."""
    seq_lens = (computed_lens[slots] + query_start.diff()).masked_fill_(slots < 0, 0)
    last_tokens = (query_start[1:] - 1).long().masked_fill_(slots < 0, 0)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=query_start.device)
    row = torch.searchsorted(query_start[1:], tokens, right=True)
    padding = row == slots.shape[0]
    row = row.clamp_(max=slots.shape[0] - 1)
    slot = slots[row]
    positions = (computed_lens[slot] + tokens - query_start[row]).masked_fill_(padding, 0)
    input_ids = token_table[slot, positions].long().masked_fill_(padding, 0)
    block_ids = block_tables[slot, positions // block_size].long()
    slot_mapping = (block_ids * block_size + positions % block_size).masked_fill_(padding, -1)
    return StepInputs(input_ids, positions, slot_mapping, seq_lens, last_tokens)


def prepare_inputs_triton(
    token_table: torch.Tensor,
    computed_lens: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    num_tokens: int,
    block_size: int,
) -> StepInputs:
    """`prepare_inputs` by a Triton kernel."""
    device, num_rows = query_start.device, slots.shape[0]
    inputs = StepInputs(
        torch.empty(num_tokens, dtype=torch.int64, device=device),
        torch.empty(num_tokens, dtype=torch.int32, device=device),
        torch.empty(num_tokens, dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(num_rows, dtype=torch.int64, device=device),
    )
    launch(
        _prepare_inputs_kernel,
        (triton.cdiv(num_tokens, _BLOCK) + triton.cdiv(num_rows, _BLOCK),),
        token_table,
        computed_lens,
        block_tables,
        slots,
        query_start,
        *inputs,
        num_rows,
        num_tokens,
        token_table.shape[1],
        block_tables.shape[1],
        block_size,
        _BLOCK,
        num_warps=4,
    )
    return inputs


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens"],
    do_not_specialize_on_alignment=["slots_ptr", "query_start_ptr"],
)
def _prepare_inputs_kernel(
    token_table_ptr: tl.tensor,
    computed_lens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    token_table_width: tl.tensor,
    block_table_width: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK tokens; the programs after those for the tokens take BLOCK rows each."""
    token_programs = tl.cdiv(num_tokens, BLOCK)
    if tl.program_id(0) >= token_programs:
        rows = (tl.program_id(0) - token_programs) * BLOCK + tl.arange(0, BLOCK)
        mask = rows < num_rows
        slot = tl.load(slots_ptr + rows, mask=mask, other=-1)
        end = tl.load(query_start_ptr + rows + 1, mask=mask, other=0)
        query_len = end - tl.load(query_start_ptr + rows, mask=mask, other=0)
        computed = tl.load(computed_lens_ptr + slot, mask=slot >= 0, other=0)
        tl.store(seq_lens_ptr + rows, tl.where(slot >= 0, computed + query_len, 0), mask=mask)
        tl.store(last_tokens_ptr + rows, tl.where(slot >= 0, end - 1, 0).to(tl.int64), mask=mask)
        return
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A token's row is the number of rows that end at or before it.
    row = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        ends = tl.load(query_start_ptr + 1 + rows, mask=rows < num_rows, other=2**31 - 1)
        row += tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), axis=1)
    real = (row < num_rows) & (tokens < num_tokens)
    slot = tl.load(slots_ptr + row, mask=real, other=0).to(tl.int64)
    computed = tl.load(computed_lens_ptr + slot, mask=real, other=0)
    start = tl.load(query_start_ptr + row, mask=real, other=0)
    position = tl.where(real, computed + tokens - start, 0)
    input_id = tl.load(token_table_ptr + slot * token_table_width + position, mask=real, other=0)
    block_column = position // BLOCK_SIZE
    block_id = tl.load(block_tables_ptr + slot * block_table_width + block_column, mask=real, other=0).to(tl.int64)
    cache_slot = tl.where(real, block_id * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    mask = tokens < num_tokens
    tl.store(input_ids_ptr + tokens, input_id.to(tl.int64), mask=mask)
    tl.store(positions_ptr + tokens, position, mask=mask)
    tl.store(slot_mapping_ptr + tokens, cache_slot, mask=mask)
