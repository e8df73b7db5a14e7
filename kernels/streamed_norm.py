"""The norm between two streamed products (streamed_linear.py), half of it in the one before, half in the one after.

What a norm gives is the stream times a weight for each column and a scale for each row. The product before, whose
result is added to the residual stream, has the sum in registers: it stores that times the weights, and of each row of a
tile the sum of squares. The product after multiplies the former, and scales the rows of its result by what the latter
say. So there is no kernel between the two.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from paceline.kernels.streamed_rows import rows_of

_LOADED_AT_ONCE = gl.constexpr(512)


@gluon.jit
def find_scales(
    squares: gl.tuple,
    scales: gl.shared_memory_descriptor,
    ready: gl.shared_memory_descriptor,
    first_row: gl.tensor,
    num_rows: gl.tensor,
    second_half: gl.tensor,
) -> None:
    """The part of a warp of its own: the scales of the rows of a tile, while the others multiply."""
    squares_ptr, num_squares, size, eps = squares
    ROWS: gl.constexpr = scales.shape[0]
    TILES: gl.constexpr = _LOADED_AT_ONCE // ROWS
    LANES: gl.constexpr = min(ROWS, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [1, 1], [1, 0])
    if num_squares > 0:
        rows = first_row + rows_of(gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout)), second_half, ROWS)
        tiles = gl.arange(0, TILES, layout=gl.SliceLayout(1, layout))
        total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(0, layout))
        gdc_wait()
        if num_rows == 1:
            # By the kernel for few rows there are many, which lie together.
            places = gl.arange(0, _LOADED_AT_ONCE, layout=gl.BlockedLayout([4], [32], [1], [0]))
            for start in range(0, num_squares, _LOADED_AT_ONCE):
                real = start + places < num_squares
                total += gl.sum(gl.load(squares_ptr + start + places, mask=real, other=0.0), axis=0)
        else:
            for start in range(0, num_squares, TILES):
                real = (start + tiles < num_squares)[:, None] & (rows < num_rows)[None, :]
                places = (start + tiles)[:, None] * num_rows + rows[None, :]
                total += gl.sum(gl.load(squares_ptr + places, mask=real, other=0.0), axis=0)
        scales.store(gl.rsqrt(total / size + eps))
        mbarrier.arrive(ready)


@gluon.jit
def add_to_stream(
    result: gl.tensor,
    residual: gl.tensor,
    weight: gl.tensor,
    total_ptr: gl.tensor,
    squares_ptr: gl.tensor,
    real: gl.tensor,
    row_is_real: gl.tensor,
) -> gl.tensor:
    """Store residual + result at total_ptr and the squares of each row at squares_ptr; return the sum times weight."""
    dtype: gl.constexpr = residual.dtype
    total = (result.to(dtype).to(gl.float32) + residual.to(gl.float32)).to(dtype)
    gl.store(total_ptr, total, mask=real)
    wide = total.to(gl.float32)
    gl.store(squares_ptr, gl.sum(wide * wide, axis=1), mask=row_is_real)
    return wide * weight[None, :].to(gl.float32)
