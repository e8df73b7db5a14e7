"""How the Hopper kernel of `paged_prefill_attention` fetches keys and values: one warp that does nothing else."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

HALF = gl.constexpr(64)
"""Elements of a row that lie together in shared memory: 128 bytes, the width of its swizzle."""

_wait_for_each_other = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""What the warps of a part of a kernel do here; Triton 3.6 has it under its earlier name."""


@gluon.jit
def _copy_blocks(
    cache: tma.tensor_descriptor,
    tile: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    row: gl.tuple,
    start: gl.tensor,
    hole: gl.tensor,
    column: gl.tensor,
) -> None:
    """Start to copy a tile of a row, block by block but the one at token `hole`; past the row's end are zeros."""
    table_ptr, seq_len, num_slots = row
    BLOCK_SIZE: gl.constexpr = cache.block_type.shape[0]
    HALVES: gl.constexpr = tile.shape[1] // HALF
    BLOCKS: gl.constexpr = tile.shape[0] // BLOCK_SIZE
    blocks = tile._reinterpret(tile.dtype, [HALVES * BLOCKS, BLOCK_SIZE, HALF], tile.layout)
    for block in gl.static_range(BLOCKS):
        token = start + block * BLOCK_SIZE
        slot = num_slots  # Outside of the cache the copy finds zeros.
        if token < seq_len:
            slot = gl.load(table_ptr + token // BLOCK_SIZE) * BLOCK_SIZE
        for half in gl.static_range(HALVES):
            to = blocks.index(half * BLOCKS + block)
            tma.async_copy_global_to_shared(cache, [slot, column + half * HALF], full, to, pred=token != hole)


@gluon.jit
def _copy_rows(
    cache_ptr: gl.tensor,
    tile: gl.shared_memory_descriptor,
    first: gl.tensor,
    num_rows: gl.tensor,
    slot: gl.tensor,
    column: gl.tensor,
    STRIDE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> None:
    """Copy num_rows rows of the block at this slot to a tile's rows from `first` on, and zeros for the block's rest."""
    ROWS: gl.constexpr = 8
    HALVES: gl.constexpr = tile.shape[1] // HALF
    PARTS: gl.constexpr = tile.shape[0] // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    parts = tile._reinterpret(tile.dtype, [HALVES * PARTS, ROWS, HALF], tile.layout)
    for part in range(BLOCK_SIZE // ROWS):
        rows = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        columns = column + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
        offsets = (slot + rows).to(gl.int64)[:, None] * STRIDE + columns[None, :]
        for half in gl.static_range(HALVES):
            values = gl.load(cache_ptr + offsets + half * HALF, mask=(rows < num_rows)[:, None], other=0.0)
            parts.index(half * PARTS + first // ROWS + part).store(values)
    fence_async_shared()
    _wait_for_each_other()


@gluon.jit
def load_tiles(
    k_slots: tma.tensor_descriptor,
    v_slots: tma.tensor_descriptor,
    v_cache_ptr: gl.tensor,
    buffers: gl.tuple,
    row: gl.tuple,
    kv_head: gl.tensor,
    num_tiles: gl.tensor,
    KV_HEADS: gl.constexpr,
) -> None:
    """Fill the tiles of keys and values in turn, each when both groups are through with what it held.

    What lies past the end of a row may be NaN. Keys there only make scores that are masked, but a value that is NaN
    is so whatever its weight: the values of a row's last block, if it is not full, are not copied as a block.
    """
    k_tiles, v_tiles, k_full, v_full, k_empty, v_empty = buffers
    table_ptr, seq_len, _ = row
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    BLOCK_SIZE: gl.constexpr = k_slots.block_type.shape[0]
    column = kv_head * HEAD_DIM
    rest = seq_len % BLOCK_SIZE
    hole = gl.where(rest > 0, seq_len - rest, -1)
    for i in range(num_tiles):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        start = i * BLOCK_N
        full = k_full.index(stage)
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(full, BLOCK_N * HEAD_DIM * 2)
        _copy_blocks(k_slots, k_tiles.index(stage), full, row, start, -1, column)

        full = v_full.index(stage)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        has_hole = (hole >= start) & (hole < start + BLOCK_N)
        if has_hole:
            slot = gl.load(table_ptr + hole // BLOCK_SIZE) * BLOCK_SIZE
            v_tile = v_tiles.index(stage)
            _copy_rows(v_cache_ptr, v_tile, hole - start, rest, slot, column, KV_HEADS * HEAD_DIM, BLOCK_SIZE)
        mbarrier.expect(full, (BLOCK_N - BLOCK_SIZE) * HEAD_DIM * 2, pred=has_hole)
        mbarrier.expect(full, BLOCK_N * HEAD_DIM * 2, pred=(hole < start) | (hole >= start + BLOCK_N))
        _copy_blocks(v_slots, v_tiles.index(stage), full, row, start, hole, column)
