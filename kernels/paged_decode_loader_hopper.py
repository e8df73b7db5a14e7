"""The warp of the Hopper decode kernel that fetches keys and values, ahead of those that multiply."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from paceline.kernels.gluon_names import HALF, in_parts, start_copy

RUN = gl.constexpr(16)
"""Tokens that are copied at a time: as many as the smallest cache block has."""


@gluon.jit
def find_piece(turn: gl.tensor, rows: gl.tuple, KV_HEADS: gl.constexpr) -> tuple[gl.tensor, ...]:
    """Return what a program does at a turn: which row (negative: there is no more), KV head and chunk of the row.

    Also the row's first chunk among the chunks of all rows, and its length, block table and query token.
    """
    (
        block_tables_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, rows_ptr, chunks_ptr, firsts_ptr, num_pieces,
        block_table_width,
    ) = rows  # fmt: skip
    # Pieces come from the longest to the shortest: who was among the first in one turn is among the last in the next.
    place = gl.where(turn % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))
    number = turn * gl.num_programs(0) + place
    piece = number // KV_HEADS
    inside = piece < num_pieces
    row = gl.load(rows_ptr + piece, mask=inside, other=-1)
    chunk = gl.load(chunks_ptr + piece, mask=inside, other=0)
    first_of_row = gl.load(firsts_ptr + piece, mask=inside, other=0)
    some_row = gl.maximum(row, 0)
    seq_len = gl.load(seq_lens_ptr + some_row)
    slot = gl.maximum(gl.load(row_slots_ptr + some_row), 0).to(gl.int64)
    token = gl.load(query_start_ptr + some_row).to(gl.int64)
    return row, number % KV_HEADS, chunk, first_of_row, seq_len, block_tables_ptr + slot * block_table_width, token


@gluon.jit
def _find_run(
    table_ptr: gl.tensor, token: gl.tensor, seq_len: gl.tensor, num_slots: gl.tensor, BLOCK_SIZE: gl.constexpr
) -> gl.tensor:
    """Return the slot of the first token of a run; past the row's end a place outside of the cache, which is zeros."""
    block = gl.load(table_ptr + token // BLOCK_SIZE, mask=token < seq_len, other=0)
    return gl.where(token < seq_len, block * BLOCK_SIZE + token % BLOCK_SIZE, num_slots)


@gluon.jit
def _copy_run(
    cache: tma.tensor_descriptor, parts: gl.shared_memory_descriptor, full: gl.shared_memory_descriptor,
    slot: gl.tensor, column: gl.tensor, run: gl.constexpr, RUNS: gl.constexpr,
) -> None:  # fmt: skip
    """Start to copy a run of tokens to its place in a tile."""
    for half in gl.static_range(parts.shape[0] // RUNS):
        start_copy(cache, [slot, column + half * HALF], full, parts.index(half * RUNS + run))


@gluon.jit
def stream_pieces(
    k_slots: tma.tensor_descriptor,
    v_slots: tma.tensor_descriptor,
    rows: gl.tuple,
    chunk_len_ptr: gl.tensor,
    num_slots: gl.tensor,
    tiles: gl.tuple,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> None:
    """Fill the tiles of keys and values in turn, each as soon as the last use of its place is over.

    A row's newest token may not be in the cache yet, and what lies past it is anything: the readers see to that.
    """
    k_tiles, v_tiles, full, empty = tiles
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    RUNS: gl.constexpr = BLOCK_N // RUN
    gl.static_assert(RUNS == 4)
    chunk_len = gl.load(chunk_len_ptr)
    done = 0
    turn = 0
    row, kv_head, chunk, _, seq_len, table_ptr, _ = find_piece(turn, rows, KV_HEADS)
    while row >= 0:
        column = kv_head * HEAD_DIM
        for start in range(chunk * chunk_len, gl.minimum((chunk + 1) * chunk_len, seq_len), BLOCK_N):
            # All of these are on their way before the first is needed.
            slot0 = _find_run(table_ptr, start, seq_len, num_slots, BLOCK_SIZE)
            slot1 = _find_run(table_ptr, start + RUN, seq_len, num_slots, BLOCK_SIZE)
            slot2 = _find_run(table_ptr, start + 2 * RUN, seq_len, num_slots, BLOCK_SIZE)
            slot3 = _find_run(table_ptr, start + 3 * RUN, seq_len, num_slots, BLOCK_SIZE)
            stage = done % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(ready, 2 * BLOCK_N * HEAD_DIM * 2)
            k_parts = in_parts(k_tiles.index(stage), RUN)
            v_parts = in_parts(v_tiles.index(stage), RUN)
            _copy_run(k_slots, k_parts, ready, slot0, column, 0, RUNS)
            _copy_run(k_slots, k_parts, ready, slot1, column, 1, RUNS)
            _copy_run(k_slots, k_parts, ready, slot2, column, 2, RUNS)
            _copy_run(k_slots, k_parts, ready, slot3, column, 3, RUNS)
            _copy_run(v_slots, v_parts, ready, slot0, column, 0, RUNS)
            _copy_run(v_slots, v_parts, ready, slot1, column, 1, RUNS)
            _copy_run(v_slots, v_parts, ready, slot2, column, 2, RUNS)
            _copy_run(v_slots, v_parts, ready, slot3, column, 3, RUNS)
            done += 1
        turn += 1
        row, kv_head, chunk, _, seq_len, table_ptr, _ = find_piece(turn, rows, KV_HEADS)
