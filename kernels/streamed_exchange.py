"""How the programs of a streamed product that is cut into pieces put their sums together.

Each stores its sums to memory and then adds up those of all pieces for its share of the rows. That a sum has arrived
is seen by the sum itself, which is then no longer the mark that was there before: one way through the L2 cache, while
a counter would take a fence and three.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paceline.kernels.gluon_names import wait_for_each_other
from paceline.kernels.streamed_rows import rows_of

_ABSENT = gl.constexpr(-1)
"""Bits of a NaN that is not the one that arithmetic makes."""
_NAN = gl.constexpr(0x7FFFFFFF)
_WARPS = 4
"""In a group."""


@gluon.constexpr_function
def layout_of_share(rows: int, columns: int) -> gl.BlockedLayout:
    """How the sums [rows, columns] that a group of warps adds up lie in its threads."""
    vector = min(4, max(1, rows * columns // (32 * _WARPS)))
    lanes = min(32, columns // vector)
    warps = min(_WARPS, columns // (vector * lanes))
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [_WARPS // warps, warps], [1, 0])


@gluon.jit
def exchange_sums(
    values: gl.tuple,
    area_ptr: gl.tensor,
    piece: gl.tensor,
    num_rows: gl.tensor,
    second_half: gl.tensor,
    PIECES: gl.constexpr,
) -> gl.tuple:
    """Give away a piece's sums, one tensor [rows, columns] or two, and return those of all pieces for its share.

    area_ptr points at the tile's [PIECES, rows, tensors, columns] words, all _ABSENT, and again afterwards. The share
    is the piece-th of as many parts of the rows.
    """
    ROWS: gl.constexpr = values[0].shape[0]
    COLUMNS: gl.constexpr = values[0].shape[1]
    WIDTH: gl.constexpr = COLUMNS * len(values)
    layout: gl.constexpr = values[0].type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    real = rows_of(rows, second_half, ROWS) < num_rows
    given_ptr = area_ptr + piece * (ROWS * WIDTH) + rows[:, None] * WIDTH + columns[None, :]
    for part in gl.static_range(len(values)):
        bits = values[part].to(gl.int32, bitcast=True)
        bits = gl.where(bits == _ABSENT, _NAN, bits)
        gl.store(given_ptr + part * COLUMNS, bits, mask=real[:, None])

    SHARE: gl.constexpr = ROWS // PIECES
    share_layout: gl.constexpr = layout_of_share(SHARE, COLUMNS)
    rows = piece * SHARE + gl.arange(0, SHARE, layout=gl.SliceLayout(1, share_layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, share_layout))
    real = (rows_of(rows, second_half, ROWS) < num_rows)[:, None] & (columns >= 0)[None, :]
    own_ptr = area_ptr + rows[:, None] * WIDTH + columns[None, :]
    first = gl.zeros([SHARE, COLUMNS], gl.float32, layout=share_layout)
    second = gl.zeros([SHARE, COLUMNS], gl.float32, layout=share_layout)
    absent = 1
    while absent > 0:
        first, missing = _add_pieces(own_ptr, real, ROWS * WIDTH, PIECES)
        if len(values) == 2:
            second, missing_too = _add_pieces(own_ptr + COLUMNS, real, ROWS * WIDTH, PIECES)
            missing = missing | missing_too
        absent = gl.max(missing)
    wait_for_each_other()  # Several threads may wait for the same sum.
    marks = gl.full([SHARE, COLUMNS], _ABSENT, gl.int32, layout=share_layout)
    for source in gl.static_range(PIECES):
        for part in gl.static_range(len(values)):
            gl.store(own_ptr + source * (ROWS * WIDTH) + part * COLUMNS, marks, mask=real)
    return (first, second) if len(values) == 2 else (first,)


@gluon.jit
def _add_pieces(
    own_ptr: gl.tensor, real: gl.tensor, STRIDE: gl.constexpr, PIECES: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Return the sum over the pieces at own_ptr, STRIDE words apart, and 1 where one of them is absent."""
    bits = gl.load(own_ptr, mask=real, other=0, volatile=True)
    total = bits.to(gl.float32, bitcast=True)
    missing = (bits == _ABSENT).to(gl.int32)
    for source in gl.static_range(1, PIECES):
        bits = gl.load(own_ptr + source * STRIDE, mask=real, other=0, volatile=True)
        total += bits.to(gl.float32, bitcast=True)
        missing = missing | (bits == _ABSENT).to(gl.int32)
    return total, missing
