"""Dealing out the decoding rows of a step in pieces of equal length, so that every part of the GPU has as much to do.

Rows have from one to a hundred thousand tokens. A chunk is as long as it takes for all of them together to make about
the same number of programs in every step, so the grid of the attention kernel is fixed and can be captured in a CUDA
graph: the number of chunks of R rows is at most R plus what the GPU is to be filled with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.kernels.launch import launch, num_processors

PROGRAMS_PER_PROCESSOR = 4
BLOCK_N = 64
"""Tokens that the attention kernel takes at a time; chunks are multiples of it."""
MIN_CHUNK = BLOCK_N
"""A single tile: at few and short rows what counts is how soon a program is through with its own."""
UNALIGNED = [
    "block_tables_ptr", "row_slots_ptr", "query_start_ptr", "seq_lens_ptr",
    "rows_ptr", "chunks_ptr", "chunk_len_ptr", "arrivals_ptr",
]  # fmt: skip
"""Arguments of the attention kernels that may be views anywhere into larger tensors."""
_BLOCK = 64


@dataclass(frozen=True)
class DecodeWork:
    """W pieces of work, a piece of nobody's where rows is -1; the pieces of a row follow one another."""

    rows: torch.Tensor
    """[W] int32."""
    chunks: torch.Tensor
    """[W] int32: which chunk of the row."""
    chunk_len: torch.Tensor
    """[1] int32: tokens a chunk; a row's last one has what is left."""
    arrivals: torch.Tensor
    """[R * kv_heads] int32, zero between kernels: how many chunks of a row are done."""


def plan_decode(query_start: torch.Tensor, seq_lens: torch.Tensor, kv_heads: int) -> DecodeWork:
    """Chunks of the rows that have one query token; query_start [R + 1] int32, seq_lens [R] int32."""
    num_rows = seq_lens.shape[0]
    device = seq_lens.device
    programs = PROGRAMS_PER_PROCESSOR * num_processors(device)
    size = num_rows + triton.cdiv(programs, kv_heads)
    work = torch.empty(2 * size + 1 + num_rows * kv_heads, dtype=torch.int32, device=device)
    rows, chunks, chunk_len, arrivals = work.split([size, size, 1, num_rows * kv_heads])
    launch(
        _plan_decode_kernel,
        (triton.cdiv(size, _BLOCK),),
        query_start,
        seq_lens,
        rows,
        chunks,
        chunk_len,
        arrivals,
        num_rows,
        size,
        kv_heads,
        programs,
        MIN_CHUNK,
        BLOCK_N,
        triton.next_power_of_2(max(num_rows, _BLOCK)),
        _BLOCK,
        num_warps=4,
    )
    return DecodeWork(rows, chunks, chunk_len, arrivals)


@triton.jit(
    do_not_specialize=["num_rows", "size"],
    do_not_specialize_on_alignment=["query_start_ptr", "rows_ptr", "chunks_ptr", "chunk_len_ptr", "arrivals_ptr"],
)
def _plan_decode_kernel(
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    chunk_len_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    KV_HEADS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK pieces of work; every program counts all rows for itself."""
    index = tl.arange(0, BLOCK_R)
    real = index < num_rows
    start = tl.load(query_start_ptr + index, mask=real, other=0)
    end = tl.load(query_start_ptr + index + 1, mask=real, other=0)
    length = tl.where(end - start == 1, tl.load(seq_lens_ptr + index, mask=real, other=0), 0)
    share = tl.cdiv(tl.sum(length.to(tl.int64), axis=0) * KV_HEADS, PROGRAMS).to(tl.int32)
    chunk_len = tl.maximum(tl.cdiv(share, BLOCK_N) * BLOCK_N, MIN_CHUNK)
    counts = tl.cdiv(length, chunk_len)
    ends = tl.cumsum(counts, axis=0)

    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = (ends[None, :] <= piece[:, None]) & real[None, :]
    row = tl.sum(before.to(tl.int32), axis=1)
    chunk = piece - tl.sum(tl.where(before, counts[None, :], 0), axis=1)
    tl.store(rows_ptr + piece, tl.where(row < num_rows, row, -1), mask=piece < size)
    tl.store(chunks_ptr + piece, chunk, mask=piece < size)
    if tl.program_id(0) == 0:
        tl.store(chunk_len_ptr, chunk_len)
        for head in range(KV_HEADS):
            tl.store(arrivals_ptr + index * KV_HEADS + head, tl.zeros_like(index), mask=real)
