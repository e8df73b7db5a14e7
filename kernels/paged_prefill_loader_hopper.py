"""The warp of the Hopper prefill kernel that finds the program's work and fetches keys and values for it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from paceline.kernels.gluon_names import HALF, in_parts, start_copy, wait_for_each_other

QUERY_BEGIN = gl.constexpr(0)
QUERY_LEN = gl.constexpr(1)
POSITION = gl.constexpr(2)
FIRST_PAIR = gl.constexpr(3)
KV_HEAD = gl.constexpr(4)
NUM_TILES = gl.constexpr(5)
"""What the two groups are told of a piece of work, by place: the row's first token and number of queries, how many
tokens came before those, the first pair of (query, head), the KV head, and how many tiles of keys; 0 ends the work."""

_ROWS_AT_ONCE = gl.constexpr(256)
"""How many rows are looked at in one go in search of a piece of work."""


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
    blocks = in_parts(tile, BLOCK_SIZE)
    for block in gl.static_range(BLOCKS):
        token = start + block * BLOCK_SIZE
        slot = num_slots  # Outside of the cache the copy finds zeros.
        if token < seq_len:
            slot = gl.load(table_ptr + token // BLOCK_SIZE) * BLOCK_SIZE
        for half in gl.static_range(HALVES):
            to = blocks.index(half * BLOCKS + block)
            start_copy(cache, [slot, column + half * HALF], full, to, pred=token != hole)


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
    parts = in_parts(tile, ROWS)
    for part in range(BLOCK_SIZE // ROWS):
        rows = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        columns = column + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
        offsets = (slot + rows).to(gl.int64)[:, None] * STRIDE + columns[None, :]
        for half in gl.static_range(HALVES):
            values = gl.load(cache_ptr + offsets + half * HALF, mask=(rows < num_rows)[:, None], other=0.0)
            parts.index(half * PARTS + first // ROWS + part).store(values)
    fence_async_shared()
    wait_for_each_other()


@gluon.jit
def _add(left: gl.tensor, right: gl.tensor) -> gl.tensor:
    return left + right


@gluon.jit
def _find_row(
    tile: gl.tensor, query_start_ptr: gl.tensor, num_rows: gl.tensor, GROUP: gl.constexpr, BLOCK_M: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Return the row that a tile of queries belongs to, the row's first tile, and how many tiles there are.

    The row is num_rows or more if there are fewer tiles.
    """
    row = 0
    first_of_row = 0
    total = 0
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        rows = first + gl.arange(0, _ROWS_AT_ONCE, layout=gl.BlockedLayout([8], [32], [1], [0]))
        begin = gl.load(query_start_ptr + rows, mask=rows < num_rows, other=0)
        end = gl.load(query_start_ptr + rows + 1, mask=rows < num_rows, other=0)
        tiles = gl.where(end - begin >= 2, ((end - begin) * GROUP + BLOCK_M - 1) // BLOCK_M, 0)
        through = total + gl.associative_scan(tiles, 0, _add)
        before = through <= tile
        row += gl.sum(before.to(gl.int32), axis=0)
        first_of_row = gl.maximum(first_of_row, gl.max(gl.where(before, through, 0), axis=0))
        total += gl.sum(tiles, axis=0)
    return row, first_of_row, total


@gluon.jit
def _stream_tiles(
    k_slots: tma.tensor_descriptor,
    v_slots: tma.tensor_descriptor,
    v_cache_ptr: gl.tensor,
    buffers: gl.tuple,
    row: gl.tuple,
    kv_head: gl.tensor,
    done: gl.tensor,
    num_tiles: gl.tensor,
    KV_HEADS: gl.constexpr,
) -> None:
    """Fill the tiles of keys and values in turn, `done` before, each when both groups are through with its last use.

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
        stage = (done + i) % STAGES
        phase = ((done + i) // STAGES) & 1
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


@gluon.jit
def load_work(
    k_slots: tma.tensor_descriptor,
    v_slots: tma.tensor_descriptor,
    v_cache_ptr: gl.tensor,
    rows: gl.tuple,
    counter_ptr: gl.tensor,
    work: gl.tuple,
    buffers: gl.tuple,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
) -> None:
    """Take one piece of work after the other, tell the groups of it and fetch its keys and values.

    A piece is BLOCK_M pairs of (query, head of the group) of one row and KV head. The first is the one of the
    program's number; from then on the programs draw numbers from a counter, which starts at 0. Each draws once for
    every piece that it takes and once in vain: so the last to draw is known, and sets the counter back.
    """
    block_tables_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, num_rows, num_slots, block_table_width = rows
    places, told, heard = work
    k_tiles, _, _, _, _, _ = buffers
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    number = gl.program_id(0)
    turn = 0
    done = 0
    num_tiles = 1
    while num_tiles > 0:
        kv_head = number % KV_HEADS
        tile = number // KV_HEADS
        found, first_of_row, all_tiles = _find_row(tile, query_start_ptr, num_rows, GROUP, BLOCK_M)
        row = gl.minimum(found, num_rows - 1)
        query_begin = gl.load(query_start_ptr + row)
        query_len = gl.load(query_start_ptr + row + 1) - query_begin
        seq_len = gl.load(seq_lens_ptr + row)
        table_ptr = block_tables_ptr + gl.load(row_slots_ptr + row).to(gl.int64) * block_table_width
        position = seq_len - query_len
        # A row's last queries see the most tokens; they come first, so that none of them is left over at the end.
        first_pair = ((query_len * GROUP + BLOCK_M - 1) // BLOCK_M - 1 - (tile - first_of_row)) * BLOCK_M
        last = position + gl.minimum((first_pair + BLOCK_M - 1) // GROUP, query_len - 1)
        num_tiles = gl.where(found < num_rows, last // BLOCK_N + 1, 0)

        place = gl.arange(0, places.shape[1], layout=gl.BlockedLayout([1], [32], [1], [0]))
        told_values = gl.where(place == QUERY_BEGIN, query_begin, query_len)
        told_values = gl.where(place == POSITION, position, told_values)
        told_values = gl.where(place == FIRST_PAIR, first_pair, told_values)
        told_values = gl.where(place == KV_HEAD, kv_head, told_values)
        told_values = gl.where(place == NUM_TILES, num_tiles, told_values)
        mbarrier.wait(heard.index(turn % 2), ((turn // 2) & 1) ^ 1)
        places.index(turn % 2).store(told_values)
        mbarrier.arrive(told.index(turn % 2))
        turn += 1
        drawn = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        if drawn == all_tiles * KV_HEADS + gl.num_programs(0) - 1:
            gl.store(counter_ptr, 0)
        number = gl.num_programs(0) + drawn
        row_of_cache = (table_ptr, seq_len, num_slots)
        _stream_tiles(k_slots, v_slots, v_cache_ptr, buffers, row_of_cache, kv_head, done, num_tiles, KV_HEADS)
        done += num_tiles
