"""Dealing out the decoding rows of a step in pieces of equal length, so that every part of the GPU has as much to do.

Rows have from one to a hundred thousand tokens. A chunk is as long as it takes for all of them together to make about
the same number of programs in every step, so the grid of the attention kernel is fixed and can be captured in a CUDA
graph: the number of chunks of R rows is at most R plus what the GPU is to be filled with. Rows are left whole where
the longest is hardly longer than that: results that are put together are late.

The longest pieces come first. So whoever takes them in turns, there and back again, has about as much to do as others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.kernels.launch import launch, num_processors

PROGRAMS_PER_PROCESSOR = 2
BLOCK_N = 64
"""Tokens that the attention kernel takes at a time; chunks are multiples of it."""
MIN_CHUNK = 128
"""Putting results together takes about as long as so many tokens; shorter chunks cost more than they save."""
UNALIGNED = [
    "block_tables_ptr", "row_slots_ptr", "query_start_ptr", "seq_lens_ptr",
    "rows_ptr", "chunks_ptr", "firsts_ptr", "chunk_len_ptr", "arrivals_ptr",
]  # fmt: skip
"""Arguments of the attention kernels that may be views anywhere into larger tensors."""
_BLOCK = 16
_COMPARED_AT_ONCE = 32


@dataclass(frozen=True)
class DecodeWork:
    """A step's W pieces of work from the longest to the shortest, then pieces of nobody's, where rows is -1."""

    rows: torch.Tensor
    """[W] int32."""
    chunks: torch.Tensor
    """[W] int32: which chunk of the row."""
    firsts: torch.Tensor
    """[W] int32: the number of the row's first chunk among the chunks of all rows."""
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
    work = torch.empty(3 * size + 1 + num_rows * kv_heads, dtype=torch.int32, device=device)
    rows, chunks, firsts, chunk_len, arrivals = work.split([size, size, size, 1, num_rows * kv_heads])
    launch(
        _plan_decode_kernel,
        (triton.cdiv(size, _BLOCK),),
        query_start,
        seq_lens,
        rows,
        chunks,
        firsts,
        chunk_len,
        arrivals,
        num_rows,
        size,
        kv_heads,
        programs,
        MIN_CHUNK,
        BLOCK_N,
        triton.next_power_of_2(max(num_rows, _COMPARED_AT_ONCE)),
        _COMPARED_AT_ONCE,
        _BLOCK,
        num_warps=4,
    )
    return DecodeWork(rows, chunks, firsts, chunk_len, arrivals)


@triton.jit(
    do_not_specialize=["num_rows", "size"],
    do_not_specialize_on_alignment=[
        "query_start_ptr", "rows_ptr", "chunks_ptr", "firsts_ptr", "chunk_len_ptr", "arrivals_ptr",
    ],
)  # fmt: skip
def _plan_decode_kernel(
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    chunk_len_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    KV_HEADS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COMPARED_AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK pieces of work; every program counts all rows for itself."""
    index = tl.arange(0, BLOCK_R)
    length = _lengths(query_start_ptr, seq_lens_ptr, index, num_rows)
    share = tl.cdiv(tl.sum(length.to(tl.int64), axis=0) * KV_HEADS, PROGRAMS).to(tl.int32)
    longest = tl.max(length, axis=0)
    if longest <= share + MIN_CHUNK:
        share = longest
    chunk_len = tl.maximum(tl.cdiv(share, BLOCK_N) * BLOCK_N, MIN_CHUNK)
    counts = tl.cdiv(length, chunk_len)
    firsts = tl.cumsum(counts, axis=0) - counts
    # Chunks of full length come first, row after row, then the rests of rows in the order of their lengths.
    full = length // chunk_len
    full_ends = tl.cumsum(full, axis=0)
    num_full = tl.sum(full, axis=0)
    rest = length - full * chunk_len
    rank = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for start in range(0, num_rows, COMPARED_AT_ONCE):
        others = start + tl.arange(0, COMPARED_AT_ONCE)
        other_rest = _lengths(query_start_ptr, seq_lens_ptr, others, num_rows) % chunk_len
        longer = other_rest[None, :] > rest[:, None]
        earlier = (other_rest[None, :] == rest[:, None]) & (others[None, :] < index[:, None])
        rank += tl.sum((longer | earlier).to(tl.int32), axis=1)

    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_full = piece < num_full
    full_row = tl.sum((full_ends[None, :] <= piece[:, None]).to(tl.int32), axis=1)
    mine = tl.where(
        is_full[:, None],
        index[None, :] == full_row[:, None],
        (rank[None, :] == (piece - num_full)[:, None]) & (rest > 0)[None, :],
    )
    chunk = tl.where(is_full, piece - _pick(full_ends - full, mine), _pick(full, mine))
    inside = piece < size
    tl.store(rows_ptr + piece, tl.where(tl.sum(mine.to(tl.int32), axis=1) > 0, _pick(index, mine), -1), mask=inside)
    tl.store(chunks_ptr + piece, chunk, mask=inside)
    tl.store(firsts_ptr + piece, _pick(firsts, mine), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(chunk_len_ptr, chunk_len)
        for head in range(KV_HEADS):
            tl.store(arrivals_ptr + index * KV_HEADS + head, tl.zeros_like(index), mask=index < num_rows)


@triton.jit
def _lengths(query_start_ptr: tl.tensor, seq_lens_ptr: tl.tensor, rows: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    """The lengths of rows that have one query token, and zero for others."""
    real = rows < num_rows
    start = tl.load(query_start_ptr + rows, mask=real, other=0)
    end = tl.load(query_start_ptr + rows + 1, mask=real, other=0)
    return tl.where(end - start == 1, tl.load(seq_lens_ptr + rows, mask=real, other=0), 0)


@triton.jit
def _pick(values: tl.tensor, mine: tl.tensor) -> tl.tensor:
    """For each of BLOCK pieces the value [R] of its row, of which there is at most one in mine [BLOCK, R]."""
    return tl.sum(tl.where(mine, values[None, :], 0), axis=1)
