"""Take a step's sampled tokens into the tables that the next step starts from, on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.launch import dependent_launch, launch

_BLOCK = 128


def advance_rows(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    samples: torch.Tensor,
    token_table: torch.Tensor,
    computed_lens: torch.Tensor,
    known_lens: torch.Tensor,
) -> None:
    """Count each row's tokens as computed, and append the token of each row that samples; in place.

    token_ids: [R] int64. slots: [R] int32, each once; -1 is a padding row. query_start: [R + 1] int32. samples: [R]
    int32, 0 or 1. token_table: [S, P] int32, contiguous. computed_lens, known_lens: [S] int32.
    """
    run = advance_rows_triton if token_ids.is_cuda else advance_rows_reference
    run(token_ids, slots, query_start, samples, token_table, computed_lens, known_lens)


def advance_rows_reference(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    samples: torch.Tensor,
    token_table: torch.Tensor,
    computed_lens: torch.Tensor,
    known_lens: torch.Tensor,
) -> None:
    """`advance_rows` in plain PyTorch."""
    real = slots >= 0
    computed_lens.index_add_(0, slots[real], query_start.diff()[real])
    sampling = real & (samples > 0)
    chosen = slots[sampling]
    token_table[chosen, known_lens[chosen]] = token_ids[sampling].to(torch.int32)
    known_lens.index_add_(0, chosen, torch.ones_like(chosen))


def advance_rows_triton(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    samples: torch.Tensor,
    token_table: torch.Tensor,
    computed_lens: torch.Tensor,
    known_lens: torch.Tensor,
) -> None:
    """`advance_rows` by a Triton kernel."""
    num_rows = slots.shape[0]
    pdl = dependent_launch(slots.device)
    launch(
        _advance_rows_kernel,
        (triton.cdiv(num_rows, _BLOCK),),
        token_ids,
        slots,
        query_start,
        samples,
        token_table,
        computed_lens,
        known_lens,
        num_rows,
        token_table.shape[1],
        _BLOCK,
        pdl,
        num_warps=4,
        dependent=pdl,
    )


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["token_ids_ptr", "slots_ptr", "query_start_ptr", "samples_ptr"],
)
def _advance_rows_kernel(
    token_ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    samples_ptr: tl.tensor,
    token_table_ptr: tl.tensor,
    computed_lens_ptr: tl.tensor,
    known_lens_ptr: tl.tensor,
    num_rows: tl.tensor,
    token_table_width: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """BLOCK rows."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    slot = tl.load(slots_ptr + rows, mask=mask, other=-1).to(tl.int64)
    real = slot >= 0
    query_len = tl.load(query_start_ptr + rows + 1, mask=mask, other=0)
    query_len -= tl.load(query_start_ptr + rows, mask=mask, other=0)
    computed = tl.load(computed_lens_ptr + slot, mask=real, other=0)
    tl.store(computed_lens_ptr + slot, computed + query_len, mask=real)
    sampling = real & (tl.load(samples_ptr + rows, mask=mask, other=0) > 0)
    known = tl.load(known_lens_ptr + slot, mask=sampling, other=0)
    token_id = tl.load(token_ids_ptr + rows, mask=sampling, other=0)
    tl.store(token_table_ptr + slot * token_table_width + known, token_id.to(tl.int32), mask=sampling)
    tl.store(known_lens_ptr + slot, known + 1, mask=sampling)
