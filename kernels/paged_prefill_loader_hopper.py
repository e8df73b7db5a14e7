"""The warps of the Hopper prefill kernel that find the program's work and fetch queries, keys and values for it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from paceline.kernels.gluon_names import HALF, in_parts, start_copy, start_scattered_copy, wait_for_each_other

QUERY_BEGIN = gl.constexpr(0)
QUERY_LEN = gl.constexpr(1)
POSITION = gl.constexpr(2)
FIRST_PAIR = gl.constexpr(3)
KV_HEAD = gl.constexpr(4)
NUM_TILES = gl.constexpr(5)
SLOT = gl.constexpr(6)
"""What the other warps are told of a piece of work, by place: the row's first token and number of queries, how many
tokens came before those, the first pair of (query, head), the KV head, how many tiles of keys (0 ends the work), and
which block table is the row's."""

PIECES = gl.constexpr(2)
"""There is room for what is told of so many pieces, and for their queries: of the one at work and of the next."""

_ROWS_AT_ONCE = gl.constexpr(256)
"""How many rows are looked at in one go in search of a piece of work."""

_QUERIES_AT_ONCE = gl.constexpr(16)
"""Pairs whose queries one turn of a loop starts to copy: more would take more registers for addresses."""


@gluon.jit
def at(values: gl.tensor, place: gl.constexpr) -> gl.tensor:
    """Return one of a few values, all of which every thread holds."""
    places = gl.arange(0, values.shape[0], layout=values.type.layout)
    return gl.sum(gl.where(places == place, values, 0), axis=0)


@gluon.jit
def hear(turn: gl.tensor, work: gl.tuple) -> gl.tensor:
    """Return what is told of a piece, once it is: every thread gets all of it."""
    places, told, heard = work
    layout: gl.constexpr = gl.BlockedLayout([places.shape[1]], [32], [gl.num_warps()], [0])
    mbarrier.wait(told.index(turn % PIECES), (turn // PIECES) & 1)
    values = places.index(turn % PIECES).load(layout)
    mbarrier.arrive(heard.index(turn % PIECES))
    return values


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
def _start_queries(
    q_ptr: gl.tensor,
    tiles: gl.shared_memory_descriptor,
    first_tile: gl.tensor,
    begin: gl.tensor,
    query_len: gl.tensor,
    first_pair: gl.tensor,
    kv_head: gl.tensor,
    BLOCK_M: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
) -> None:
    """Start to copy the queries of BLOCK_M pairs to tiles from first_tile on, each of as many pairs as a group's part.

    Pairs past the row's end get its last query. The tensor memory accelerator could not do this: of a token, a piece
    takes some heads, and the first and the last token of a piece may be cut.
    """
    ROWS: gl.constexpr = tiles.shape[1]
    HEAD_DIM: gl.constexpr = tiles.shape[2]
    PARTS: gl.constexpr = ROWS // _QUERIES_AT_ONCE
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for part in range(BLOCK_M // _QUERIES_AT_ONCE):
        pairs = first_pair + part * _QUERIES_AT_ONCE + gl.arange(0, _QUERIES_AT_ONCE, layout=gl.SliceLayout(1, layout))
        query = begin + gl.minimum(pairs // GROUP, query_len - 1)
        head = query.to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + pairs % GROUP
        dims = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
        places = q_ptr + (head[:, None] * HEAD_DIM + dims[None, :])
        parts = in_parts(tiles.index(first_tile + part // PARTS), _QUERIES_AT_ONCE)
        for half in gl.static_range(HEAD_DIM // HALF):
            start_scattered_copy(parts.index(half * PARTS + part % PARTS), places + half * HALF)
    async_copy.commit_group()


@gluon.jit
def find_work(
    q_ptr: gl.tensor,
    rows: gl.tuple,
    counter_ptr: gl.tensor,
    work: gl.tuple,
    queries: gl.tuple,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
) -> None:
    """Take one piece of work after the other, tell all of it and fetch its queries.

    A piece is BLOCK_M pairs of (query, head of the group) of one row and KV head. The first is the one of the
    program's number; from then on the programs draw numbers from a counter, which starts at 0. Each draws once for
    every piece that it takes and once in vain: so the last to draw is known, and sets the counter back.
    """
    row_slots_ptr, query_start_ptr, seq_lens_ptr, num_rows = rows
    places, told, heard = work
    q_tiles, q_full, q_empty = queries
    GROUPS: gl.constexpr = BLOCK_M // q_tiles.shape[1]
    number = gl.program_id(0)
    turn = 0
    num_tiles = 1
    while num_tiles > 0:
        kv_head = number % KV_HEADS
        tile = number // KV_HEADS
        found, first_of_row, all_tiles = _find_row(tile, query_start_ptr, num_rows, GROUP, BLOCK_M)
        row = gl.minimum(found, num_rows - 1)
        query_begin = gl.load(query_start_ptr + row)
        query_len = gl.load(query_start_ptr + row + 1) - query_begin
        position = gl.load(seq_lens_ptr + row) - query_len
        slot = gl.load(row_slots_ptr + row)
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
        told_values = gl.where(place == SLOT, slot, told_values)
        now = turn % PIECES
        phase = (turn // PIECES) & 1
        mbarrier.wait(heard.index(now), phase ^ 1)
        places.index(now).store(gl.where(num_tiles > 0, told_values, 0))
        mbarrier.arrive(told.index(now))
        drawn = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        if num_tiles > 0:
            mbarrier.wait(q_empty.index(now), phase ^ 1)
            # fmt: off
            _start_queries(
                q_ptr, q_tiles, now * GROUPS, query_begin, query_len, first_pair, kv_head, BLOCK_M, GROUP, KV_HEADS,
            )
            # fmt: on
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(q_full.index(now))
        turn += 1
        if drawn == all_tiles * KV_HEADS + gl.num_programs(0) - 1:
            gl.store(counter_ptr, 0)
        number = gl.num_programs(0) + drawn


@gluon.jit
def _find_slots(
    table_ptr: gl.tensor,
    start: gl.tensor,
    seq_len: gl.tensor,
    num_slots: gl.tensor,
    BLOCKS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> gl.tensor:
    """Return the slots of a tile's blocks, to every thread; past the row's end a place outside of the cache."""
    blocks = start // BLOCK_SIZE + gl.arange(0, BLOCKS, layout=gl.BlockedLayout([BLOCKS], [32], [1], [0]))
    inside = blocks * BLOCK_SIZE < seq_len
    return gl.where(inside, gl.load(table_ptr + blocks, mask=inside, other=0) * BLOCK_SIZE, num_slots)


@gluon.jit
def _copy_blocks(
    cache: tma.tensor_descriptor,
    tile: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    slots: gl.tensor,
    column: gl.tensor,
    hole: gl.tensor,
    HAS_HOLE: gl.constexpr,
) -> None:
    """Start to copy a tile, block by block but for the one numbered `hole`. Outside of the cache are zeros."""
    BLOCK_SIZE: gl.constexpr = cache.block_type.shape[0]
    HALVES: gl.constexpr = tile.shape[1] // HALF
    BLOCKS: gl.constexpr = tile.shape[0] // BLOCK_SIZE
    blocks = in_parts(tile, BLOCK_SIZE)
    for block in gl.static_range(BLOCKS):
        slot = at(slots, block)
        for half in gl.static_range(HALVES):
            to = blocks.index(half * BLOCKS + block)
            if HAS_HOLE:
                start_copy(cache, [slot, column + half * HALF], full, to, pred=hole != block)
            else:
                start_copy(cache, [slot, column + half * HALF], full, to)


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
def load_tiles(
    cache: tma.tensor_descriptor,
    cache_ptr: gl.tensor,
    tables: gl.tuple,
    work: gl.tuple,
    buffers: gl.tuple,
    KV_HEADS: gl.constexpr,
    VALUES: gl.constexpr,
) -> None:
    """Fill the tiles of keys, or those of values, in turn, each when both groups are through with its last use.

    What lies past the end of a row may be NaN. Keys there only make scores that are masked, but a value that is NaN
    is so whatever its weight: the values of a row's last block, if it is not full, are not copied as a block.
    """
    tiles, full, empty = buffers
    block_tables_ptr, num_slots, block_table_width = tables
    STAGES: gl.constexpr = tiles.shape[0]
    BLOCK_N: gl.constexpr = tiles.shape[1]
    HEAD_DIM: gl.constexpr = tiles.shape[2]
    BLOCK_SIZE: gl.constexpr = cache.block_type.shape[0]
    BLOCKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    turn = 0
    done = 0
    num_tiles = 1
    while num_tiles > 0:
        piece = hear(turn, work)
        turn += 1
        num_tiles = at(piece, NUM_TILES)
        seq_len = at(piece, POSITION) + at(piece, QUERY_LEN)
        column = at(piece, KV_HEAD) * HEAD_DIM
        table_ptr = block_tables_ptr + at(piece, SLOT).to(gl.int64) * block_table_width
        rest = seq_len % BLOCK_SIZE
        unfilled = gl.where(rest > 0, seq_len // BLOCK_SIZE, -1)
        slots = _find_slots(table_ptr, 0, seq_len, num_slots, BLOCKS, BLOCK_SIZE)
        for i in range(num_tiles):
            # They are on their way while the tile's place is waited for.
            next_slots = _find_slots(table_ptr, (i + 1) * BLOCK_N, seq_len, num_slots, BLOCKS, BLOCK_SIZE)
            stage = (done + i) % STAGES
            ready = full.index(stage)
            tile = tiles.index(stage)
            mbarrier.wait(empty.index(stage), (((done + i) // STAGES) & 1) ^ 1)
            hole = unfilled - i * BLOCKS
            if VALUES and (hole >= 0) & (hole < BLOCKS):
                slot = gl.load(table_ptr + unfilled) * BLOCK_SIZE
                _copy_rows(cache_ptr, tile, hole * BLOCK_SIZE, rest, slot, column, KV_HEADS * HEAD_DIM, BLOCK_SIZE)
                mbarrier.expect(ready, (BLOCK_N - BLOCK_SIZE) * HEAD_DIM * 2)
                _copy_blocks(cache, tile, ready, slots, column, hole, True)
            else:
                mbarrier.expect(ready, BLOCK_N * HEAD_DIM * 2)
                _copy_blocks(cache, tile, ready, slots, column, 0, False)
            slots = next_slots
        done += num_tiles
