"""How the programs of a streamed product that is cut into pieces put their sums together.

Each stores its sums to memory and then adds up those of all pieces for its share of the rows. That a sum has arrived
is seen by the sum itself, which is then no longer the mark that was there before: one way through the L2 cache, while
a counter would take a fence and three.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paceline.kernels.gluon_names import wait_for_each_other

_ABSENT = gl.constexpr(-1)
"""Bits of a NaN that is not the one that arithmetic makes."""
_NAN = gl.constexpr(0x7FFFFFFF)


@gluon.jit
def exchange_sums(
    sums: gl.tensor,
    bias_ptr: gl.tensor,
    exchange_ptr: gl.tensor,
    out_ptr: gl.tensor,
    item: gl.tensor,
    num_rows: gl.tensor,
    num_columns: gl.tensor,
    COLUMNS: gl.constexpr,
    PIECES: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
) -> None:
    """Give away an item's sums [COLUMNS or, by turns of 8 for gate and up, twice as many, rows]; store a share of out.

    exchange_ptr points at [tiles, PIECES, rows, COLUMNS or twice as many] words, all _ABSENT, and again afterwards.
    """
    ROWS: gl.constexpr = sums.shape[1]
    WIDTH: gl.constexpr = sums.shape[0]
    tile = item // PIECES
    piece = item % PIECES
    layout: gl.constexpr = sums.type.layout
    places = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))
    if GATED:
        places = places // 16 * 8 + places % 8 + places // 8 % 2 * COLUMNS
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    bits = sums.to(gl.int32, bitcast=True)
    bits = gl.where(bits == _ABSENT, _NAN, bits)
    offsets = rows[None, :] * WIDTH + places[:, None]
    gl.store(exchange_ptr + item * (ROWS * WIDTH) + offsets, bits, mask=(rows < num_rows)[None, :])

    SHARE: gl.constexpr = ROWS // PIECES
    THREADS: gl.constexpr = 32 * gl.num_warps()
    VECTOR: gl.constexpr = min(4, max(1, SHARE * COLUMNS // THREADS))
    LANES: gl.constexpr = min(32, COLUMNS // VECTOR)
    WARPS: gl.constexpr = min(gl.num_warps(), COLUMNS // (VECTOR * LANES))
    share_layout: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR], [32 // LANES, LANES], [gl.num_warps() // WARPS, WARPS], [1, 0]
    )
    rows = piece * SHARE + gl.arange(0, SHARE, layout=gl.SliceLayout(1, share_layout))
    places = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, share_layout))
    columns = tile * COLUMNS + places
    real = (rows < num_rows)[:, None] & (places >= 0)[None, :]
    own_ptr = exchange_ptr + tile * (PIECES * ROWS * WIDTH) + rows[:, None] * WIDTH + places[None, :]
    gate = gl.zeros([SHARE, COLUMNS], gl.float32, layout=share_layout)
    up = gl.zeros([SHARE, COLUMNS], gl.float32, layout=share_layout)
    absent = 1
    while absent > 0:
        gate, missing = _add_pieces(own_ptr, real, ROWS * WIDTH, PIECES)
        if GATED:
            up, missing_up = _add_pieces(own_ptr + COLUMNS, real, ROWS * WIDTH, PIECES)
            missing = missing | missing_up
        absent = gl.max(missing)
    wait_for_each_other()  # Several threads may wait for the same sum.
    for source in gl.static_range(PIECES):
        marks = gl.full([SHARE, COLUMNS], _ABSENT, gl.int32, layout=share_layout)
        gl.store(own_ptr + source * (ROWS * WIDTH), marks, mask=real)
        if GATED:
            gl.store(own_ptr + source * (ROWS * WIDTH) + COLUMNS, marks, mask=real)
    if BIAS:
        gate += gl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(gl.float32)[None, :]
    if GATED:
        gate = gate / (1 + gl.exp(-gate)) * up
    stored = real & (columns < num_columns)[None, :]
    gl.store(out_ptr + rows[:, None] * num_columns + columns[None, :], gate.to(out_ptr.dtype.element_ty), mask=stored)


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
