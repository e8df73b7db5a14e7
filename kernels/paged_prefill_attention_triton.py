"""The Triton kernel of `paged_prefill_attention`.

The softmax is that of Milakov & Gimelshein (arXiv 1805.02867) as in FlashAttention (arXiv 2205.14135), in base 2. As in
FlashAttention-3 (arXiv 2407.08608) the scores of the next tile of keys are computed while the softmax of this one runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.kernels.launch import launch

_ROWS_AT_ONCE = tl.constexpr(256)
"""How many rows a program looks at in one go when it seeks its own."""


@dataclass(frozen=True)
class Tile:
    """How a program takes its work: block_m pairs of query and head against block_n keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    overlap: bool
    """Compute the next tile's scores during this one's softmax, for twice the registers of a tile of scores."""


_TILES = {
    (64, 2): Tile(128, 64, 8, 3, True),
    (128, 2): Tile(128, 64, 8, 3, True),
    (256, 2): Tile(128, 32, 8, 3, False),
    (64, 4): Tile(64, 64, 4, 3, False),
    (128, 4): Tile(64, 32, 4, 2, False),
}
"""By head dimension, rounded up to a power of two, and bytes an element."""
_OTHER = Tile(64, 32, 4, 1, False)
"""Where shared memory is what limits."""


def tile_for(head_dim: int, element_size: int) -> Tile:
    """Return the tile for heads of this many elements of so many bytes."""
    return _TILES.get((max(64, triton.next_power_of_2(head_dim)), element_size), _OTHER)


def paged_prefill_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> None:
    """`paged_prefill_attention` by a Triton kernel, in tiles of the given shape if any."""
    num_tokens, num_heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group, num_rows = num_heads // kv_heads, row_slots.shape[0]
    most_rows = min(num_rows, num_tokens // 2)  # of two or more tokens
    if most_rows == 0:
        return
    tile = tile or tile_for(head_dim, q.element_size())
    # Every row can leave one tile partly filled.
    most_tiles = triton.cdiv(num_tokens * group, tile.block_m) + most_rows
    launch(
        _prefill_kernel,
        (most_tiles * kv_heads,),
        q,
        k_cache,
        v_cache,
        block_tables,
        row_slots,
        query_start,
        seq_lens,
        out,
        scale * math.log2(math.e),
        num_rows,
        block_tables.shape[1],
        group,
        kv_heads,
        block_size,
        head_dim,
        tile.block_m,
        triton.next_power_of_2(head_dim),
        tile.block_n,
        tile.overlap,
        k_cache.numel() >= 2**31,
        not q.is_cuda,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def _find_tile(
    tile: tl.tensor, query_start_ptr: tl.tensor, num_rows: tl.tensor, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the row that a tile belongs to (num_rows or more if there are fewer tiles) and the row's first tile.

    The tiles of rows of two or more tokens are numbered one row after the other.
    """
    row = 0
    first_of_row = 0
    total = 0
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        rows = first + tl.arange(0, _ROWS_AT_ONCE)
        begin = tl.load(query_start_ptr + rows, mask=rows < num_rows, other=0)
        end = tl.load(query_start_ptr + rows + 1, mask=rows < num_rows, other=0)
        tiles = tl.where(end - begin >= 2, tl.cdiv((end - begin) * GROUP, BLOCK_M), 0)
        through = total + tl.cumsum(tiles, axis=0)
        before = through <= tile
        row += tl.sum(before.to(tl.int32), axis=0)
        first_of_row = tl.maximum(first_of_row, tl.max(tl.where(before, through, 0), axis=0))
        total += tl.sum(tiles, axis=0)
    return row, first_of_row


@triton.jit
def _tile_offsets(
    table_ptr: tl.tensor,
    start: tl.tensor,
    last: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Return the offsets of BLOCK_N tokens from start on in a cache, [BLOCK_N, BLOCK_D].

    Tokens from last on stand for the one before it: what lies past the end may be NaN or an invalid block id.
    """
    tokens = tl.minimum(start + tl.arange(0, BLOCK_N), last - 1)
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE)
    if WIDE:
        blocks = blocks.to(tl.int64)
    slots = blocks * BLOCK_SIZE + tokens % BLOCK_SIZE
    return (slots * TOKEN_STRIDE)[:, None] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _load(pointers: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr) -> tl.tensor:
    """Load rows of HEAD_DIM elements, with zeros up to BLOCK_D.

    UPCAST: give float32, for the interpreter, whose products of bfloat16 are wrong.
    """
    if HEAD_DIM == BLOCK_D:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=(tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], other=0.0)
    if UPCAST:
        values = values.to(tl.float32)
    return values


@triton.jit(do_not_specialize=["num_rows"])
def _prefill_kernel(
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    row_slots_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_log2: tl.tensor,
    num_rows: tl.tensor,
    block_table_width: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """BLOCK_M pairs of (query token, query head of the group) of one row and KV head, heads running fastest.

    OVERLAP: as in Tile. WIDE: offsets in a cache need 64 bits. UPCAST: as in _load.
    """
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    row, first_of_row = _find_tile(tile, query_start_ptr, num_rows, GROUP, BLOCK_M)
    if row >= num_rows:
        return
    query_begin = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - query_begin
    position = tl.load(seq_lens_ptr + row) - query_len
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    # A row's last queries see the most tokens; they start first, so that none of them is left over at the end.
    first_pair = (tl.cdiv(query_len * GROUP, BLOCK_M) - 1 - (tile - first_of_row)) * BLOCK_M
    pairs = first_pair + tl.arange(0, BLOCK_M)
    # Pairs past the end stand in for the last query, and are not stored.
    query = tl.minimum(pairs // GROUP, query_len - 1)
    limit = position + query
    last = position + tl.minimum((first_pair + BLOCK_M - 1) // GROUP, query_len - 1) + 1
    seen_by_all = position + first_pair // GROUP + 1

    TOKEN_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    dims = tl.arange(0, BLOCK_D)
    head = (query_begin + query).to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP + pairs % GROUP
    offsets = head[:, None] * HEAD_DIM + dims[None, :]
    q = _load(q_ptr + offsets, HEAD_DIM, BLOCK_D, UPCAST)
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    table_ptr = block_tables_ptr + slot * block_table_width
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    scores = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # "tf32x3" concerns float32 alone: three products of TF32 parts have its precision, one has not.
    if OVERLAP:
        k_tile = k_ptr + _tile_offsets(table_ptr, 0, last, BLOCK_SIZE, TOKEN_STRIDE, BLOCK_N, BLOCK_D, WIDE)
        k = _load(k_tile, HEAD_DIM, BLOCK_D, UPCAST)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    for start in range(0, last, BLOCK_N):
        v_offsets = _tile_offsets(table_ptr, start, last, BLOCK_SIZE, TOKEN_STRIDE, BLOCK_N, BLOCK_D, WIDE)
        k_offsets = v_offsets
        if OVERLAP:
            # Past the last tile these are scores of its last token, which nothing uses.
            k_offsets = _tile_offsets(
                table_ptr, start + BLOCK_N, last, BLOCK_SIZE, TOKEN_STRIDE, BLOCK_N, BLOCK_D, WIDE
            )
        k = _load(k_ptr + k_offsets, HEAD_DIM, BLOCK_D, UPCAST)
        v = _load(v_ptr + v_offsets, HEAD_DIM, BLOCK_D, UPCAST)
        next_scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if not OVERLAP:
            scores = next_scores
        if start + BLOCK_N > seen_by_all:
            scores = tl.where((start + tl.arange(0, BLOCK_N))[None, :] <= limit[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        shift = new_max * scale_log2
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        rescale = tl.exp2(row_max * scale_log2 - shift)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="tf32x3")
        row_max = new_max
        scores = next_scores
    mask = (pairs < query_len * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + offsets, acc / row_sum[:, None], mask=mask)
