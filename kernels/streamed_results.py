"""What becomes of the sums of a streamed product (streamed_kernel.py): results in global memory.

The tensor cores give a thread rows i and i + 8 of each 16 rows of the weight. So these are fetched such that both are
neighbouring columns of the result, 2 * i and 2 * i + 1, or gate and up of the same column: results need no way through
shared memory, and eight threads store 32 bytes of a row, or 16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paceline.kernels.streamed_rows import rows_of

TURN = gl.constexpr(8)
"""Rows of the weight that lie together in shared memory: of even columns or of odd ones, of gate or of up."""


@gluon.constexpr_function
def layout_of_results(rows: int, gated: bool) -> gl.DistributedLinearLayout:
    """How results [rows, columns] lie in threads already, written such that neighbours in a thread come first."""
    pair = [] if gated else [[0, 1]]
    columns = [[0, 1 << bit] for bit in range(len(pair), len(pair) + 5)]
    blocks = [[1 << bit, 0] for bit in range(3, rows.bit_length() - 1)]
    shape = [rows, 32 if gated else 64]
    return gl.DistributedLinearLayout([*pair, [1, 0], *blocks], [[2, 0], [4, 0], *columns[:3]], columns[3:], [], shape)


@gluon.jit
def unfold(sums: gl.tensor, GATED: gl.constexpr) -> gl.tuple:
    """Sums [rows of the weight as they were fetched, rows] as [rows, columns]: one tensor, or gate and up."""
    ROWS: gl.constexpr = sums.shape[1]
    TURNS: gl.constexpr = sums.shape[0] // (2 * TURN)
    LAYOUT: gl.constexpr = layout_of_results(ROWS, GATED)
    by_turn = gl.reshape(sums, [TURNS, 2, TURN, ROWS])
    if GATED:
        SHAPE: gl.constexpr = [ROWS, TURNS * TURN]
        gate, up = gl.split(gl.permute(by_turn, (3, 0, 2, 1)))
        gate = gl.convert_layout(gl.reshape(gate, SHAPE), LAYOUT, assert_trivial=True)
        up = gl.convert_layout(gl.reshape(up, SHAPE), LAYOUT, assert_trivial=True)
        values: gl.tuple = (gate, up)
    else:
        PLAIN_SHAPE: gl.constexpr = [ROWS, TURNS * TURN * 2]
        plain = gl.reshape(gl.permute(by_turn, (3, 0, 2, 1)), PLAIN_SHAPE)
        values = (gl.convert_layout(plain, LAYOUT, assert_trivial=True),)
    return values


@gluon.jit
def places_of(
    LAYOUT: gl.constexpr, place: gl.tensor, column: gl.tensor, second_half: gl.tensor,
    PLACES: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """Rows [PLACES], of the tile, and columns [COLUMNS] of results in a layout, the first at this place and column."""
    places = place + gl.arange(0, PLACES, layout=gl.SliceLayout(1, LAYOUT))
    return rows_of(places, second_half, ROWS), column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))


@gluon.jit
def finish(
    values: gl.tuple, bias_ptr: gl.tensor, columns: gl.tensor, num_columns: gl.tensor, BIAS: gl.constexpr
) -> gl.tensor:
    """The results of sums: of gate and up silu(gate) * up, of others what they are, plus the columns' bias."""
    result = values[0]
    if len(values) == 2:
        result = result / (1 + gl.exp(-result)) * values[1]
    if BIAS:
        result += gl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(gl.float32)[None, :]
    return result
