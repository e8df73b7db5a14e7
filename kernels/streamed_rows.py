"""Which rows of x lie in a tile of a streamed product (streamed_kernel.py), where x has fewer than its tiles hold.

What is past the end of a tensor the tensor memory accelerator fills with zeros, and that takes it several times as long
as to copy as much. So a tile has rows twice instead: the last of several tiles begins early enough to end where x ends,
and so does the second half of a tile that is the only one. Whoever stores results stores those twice, the same.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paceline.kernels.tensor_descriptors import TensorDescriptor, describe

_LEAST_HALF = 8
"""Rows that the swizzle of shared memory repeats after. With fewer, what is past the end takes no time that counts."""


def describe_rows(x: torch.Tensor, rows: int, inner: int) -> tuple[TensorDescriptor, int]:
    """Describe x [T, K] as [halves, rows, K] for tiles of so many rows, and where in x a tile's second half begins.

    That is counted from where the first begins. With half a tile's rows or fewer there is no second half. Tiles of 8
    rows are not halved, and are for no more rows than that.
    """
    num_rows, size = x.shape
    half = half_of(rows)
    if num_rows <= half:
        return describe(x, (1, num_rows, size), (num_rows * size, size, 1), (rows // half, half, inner)), half
    second = min(half, num_rows - half)
    return describe(x, (2, num_rows - second, size), (second * size, size, 1), (rows // half, half, inner)), second


@gluon.constexpr_function
def half_of(rows: int) -> int:
    """Rows of a tile that are neighbours in x: half of them, or all of a small tile."""
    return rows // 2 if rows >= 2 * _LEAST_HALF else rows


@gluon.jit
def first_row_of(tile: gl.tensor, num_rows: gl.tensor, ROWS: gl.constexpr) -> gl.tensor:
    """The row of x that a tile begins with."""
    return gl.minimum(tile * ROWS, gl.maximum(num_rows - ROWS, 0))


@gluon.jit
def rows_of(places: gl.tensor, second_half: gl.tensor, ROWS: gl.constexpr) -> gl.tensor:
    """The rows of x at these places of a tile, counted from its first."""
    HALF: gl.constexpr = half_of(ROWS)
    return places + gl.where(places >= HALF, second_half - HALF, 0)
