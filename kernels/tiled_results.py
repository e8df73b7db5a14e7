"""What becomes of a tile's sums in products of many rows (tiled_kernel.py): results in global memory.

Within 32 rows of the weight, row 8 * q + 2 * i + e lies at 8 * i + 2 * q + e in shared memory. A thread of the tensor
cores' layout has two neighbouring columns of each eight, the same in all: so it has eight columns that are neighbours
in the tensor, and stores 16 bytes of a row at once from its registers. Nothing goes through shared memory here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LOG2 = gl.constexpr(-1.4426950408889634)
"""Of 1 / e."""


@gluon.constexpr_function
def _result_layout(rows: int, columns: int) -> gl.DistributedLinearLayout:
    """How results lie in threads already, written such that the compiler sees eight neighbours of a row in each."""
    across = [[0, 1 << bit] for bit in range(columns.bit_length() - 1)]
    lanes = [*across[3:5], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [*across[:3], *across[5:], [8, 0]], lanes, [[16, 0], [32, 0]], [], [rows, columns]
    )


@gluon.jit
def _in_order(sums: gl.tensor) -> gl.tensor:
    """Sums [rows, columns as they lie in shared memory] with columns in their order."""
    SHAPE: gl.constexpr = [sums.shape[0], sums.shape[1]]
    TURNS: gl.constexpr = [sums.shape[0], sums.shape[1] // 32, 4, 4, 2]
    return gl.reshape(gl.permute(gl.reshape(sums, TURNS), (0, 1, 3, 2, 4)), SHAPE)


@gluon.jit
def _halves(values: gl.tensor, WIDTH: gl.constexpr) -> gl.tuple:
    """The first and the second half of each WIDTH columns of [rows, columns], [rows, columns / 2] each."""
    PARTS: gl.constexpr = [values.shape[0], values.shape[1] // WIDTH, 2, WIDTH // 2]
    SHAPE: gl.constexpr = [values.shape[0], values.shape[1] // 2]
    LAYOUT: gl.constexpr = _result_layout(SHAPE[0], SHAPE[1])
    first, second = gl.split(gl.permute(gl.reshape(values, PARTS), (0, 1, 3, 2)))
    first = gl.convert_layout(gl.reshape(first, SHAPE), LAYOUT, assert_trivial=True)
    second = gl.convert_layout(gl.reshape(second, SHAPE), LAYOUT, assert_trivial=True)
    return first, second


@gluon.jit
def _reciprocal(x: gl.tensor) -> gl.tensor:
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def store_activated(sums: gl.tensor, row: gl.tensor, column: gl.tensor, results: gl.tuple) -> None:
    """Store silu(gate) * up of a tile's sums of gate and up, whose first row and whose column of tiles are these."""
    out_ptr, num_rows, num_columns = results
    gate, up = _halves(_in_order(sums), sums.shape[1])
    values = gate * _reciprocal(1.0 + gl.exp2(gate * _LOG2)) * up
    columns = column * values.shape[1] + _columns_of(values)
    rows = row + _rows_of(values)
    real = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    out = out_ptr + (rows.to(gl.int64) * num_columns)[:, None] + columns[None, :]
    gl.store(out, values.to(out_ptr.dtype.element_ty), mask=real)


@gluon.jit
def store_heads(
    sums: gl.tensor,
    row: gl.tensor,
    column: gl.tensor,
    results: gl.tuple,
    HEAD_DIM: gl.constexpr,
    NORM: gl.constexpr,
    BIAS: gl.constexpr,
) -> None:
    """Store a tile's heads, after norm and rotation but for values, with the queries or in the caches.

    A tile's heads are all of one kind. Rounded where rotary_and_store rounds, which has the same of a product.
    """
    bias_ptr, norms, places, outs, num_rows, eps = results
    q_norm_ptr, k_norm_ptr = norms
    positions_ptr, cos_sin_ptr, slot_mapping_ptr = places
    query_ptr, k_cache_ptr, v_cache_ptr, num_queries, num_keys = outs
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    COLUMNS: gl.constexpr = sums.shape[1]
    first, second = _halves(_in_order(sums), HEAD_DIM)
    rows = row + _rows_of(first)
    real = rows < num_rows
    within = _columns_of(first)  # of first halves of heads
    dims = within % (HEAD_DIM // 2)
    columns = within // (HEAD_DIM // 2) * HEAD_DIM + dims
    if BIAS:
        bias = bias_ptr + column * COLUMNS + columns
        first += gl.load(bias).to(gl.float32)[None, :]
        second += gl.load(bias + HEAD_DIM // 2).to(gl.float32)[None, :]
    first = first.to(dtype).to(gl.float32)
    second = second.to(dtype).to(gl.float32)
    begin = column * COLUMNS
    is_query = begin < num_queries
    if begin < num_queries + num_keys:
        if NORM:
            norm_ptr = q_norm_ptr if is_query else k_norm_ptr
            scale = _scale_of(first, second, HEAD_DIM, eps)
            first = _normed(first, scale, norm_ptr + dims, dtype)
            second = _normed(second, scale, norm_ptr + HEAD_DIM // 2 + dims, dtype)
        position = gl.load(positions_ptr + rows, mask=real, other=0).to(gl.int64)
        turn = cos_sin_ptr + (position * HEAD_DIM)[:, None] + dims[None, :]
        cos = gl.load(turn)
        sin = gl.load(turn + HEAD_DIM // 2)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    if is_query:
        out = query_ptr + begin + (rows.to(gl.int64) * num_queries)[:, None] + columns[None, :]
        _store(out, first, second, real, HEAD_DIM)
    else:
        slots = gl.load(slot_mapping_ptr + rows, mask=real, other=-1)
        begin -= num_queries
        is_key = begin < num_keys
        cache_ptr = k_cache_ptr if is_key else v_cache_ptr
        begin = gl.where(is_key, begin, begin - num_keys)
        out = cache_ptr + begin + (slots * num_keys)[:, None] + columns[None, :]
        _store(out, first, second, slots >= 0, HEAD_DIM)


@gluon.jit
def _scale_of(first: gl.tensor, second: gl.tensor, HEAD_DIM: gl.constexpr, eps: gl.tensor) -> gl.tensor:
    """One over the root mean square of each head of each row, of its halves, in their shape."""
    HEADS: gl.constexpr = [first.shape[0], first.shape[1] // (HEAD_DIM // 2), HEAD_DIM // 2]
    SHAPE: gl.constexpr = [first.shape[0], first.shape[1]]
    squares = gl.reshape(first * first + second * second, HEADS)
    scale = gl.rsqrt(gl.sum(squares, axis=2) / HEAD_DIM + eps)
    scale = gl.reshape(gl.expand_dims(scale, 2) + gl.zeros_like(squares), SHAPE)
    return gl.convert_layout(scale, first.type.layout, assert_trivial=True)


@gluon.jit
def _normed(values: gl.tensor, scale: gl.tensor, weight: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    scaled = (values * scale).to(dtype).to(gl.float32)
    return (scaled * gl.load(weight).to(gl.float32)[None, :]).to(dtype).to(gl.float32)


@gluon.jit
def _store(out: gl.tensor, first: gl.tensor, second: gl.tensor, real: gl.tensor, HEAD_DIM: gl.constexpr) -> None:
    dtype: gl.constexpr = out.dtype.element_ty
    gl.store(out, first.to(dtype), mask=real[:, None])
    gl.store(out + HEAD_DIM // 2, second.to(dtype), mask=real[:, None])


@gluon.jit
def _rows_of(values: gl.tensor) -> gl.tensor:
    ROWS: gl.constexpr = values.shape[0]
    LAYOUT: gl.constexpr = gl.SliceLayout(1, values.type.layout)
    return gl.arange(0, ROWS, layout=LAYOUT)


@gluon.jit
def _columns_of(values: gl.tensor) -> gl.tensor:
    COLUMNS: gl.constexpr = values.shape[1]
    LAYOUT: gl.constexpr = gl.SliceLayout(0, values.type.layout)
    return gl.arange(0, COLUMNS, layout=LAYOUT)
