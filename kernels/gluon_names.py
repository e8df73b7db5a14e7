"""What Gluon calls by other names in some of Triton 3.6 to 3.9, and views of tiles in shared memory made of it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

HALF = gl.constexpr(64)
"""Elements of 16 bits in a row that lie together in shared memory: 128 bytes, the width of its swizzle."""

_HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
wait_for_each_other = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
start_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_has_async_load = hasattr(async_copy, "async_load")
start_scattered_copy = async_copy.async_load if _has_async_load else async_copy.async_copy_global_to_shared


@gluon.jit
def reinterpret(
    tile: gl.shared_memory_descriptor, SHAPE: gl.constexpr, LAYOUT: gl.constexpr
) -> gl.shared_memory_descriptor:
    """View the memory of a tile in another shape and layout."""
    if _HAS_REINTERPRET:
        view = tile.reinterpret(tile.dtype, SHAPE, LAYOUT)
    else:
        view = tile._reinterpret(tile.dtype, SHAPE, LAYOUT)
    return view


@gluon.jit
def in_parts(tile: gl.shared_memory_descriptor, ROWS: gl.constexpr) -> gl.shared_memory_descriptor:
    """View a tile as the parts of ROWS rows by HALF elements that lie together: [parts, ROWS, HALF].

    All parts of the first HALF elements of the tile's rows come first, from the first row to the last.
    """
    SHAPE: gl.constexpr = [tile.shape[0] * tile.shape[1] // (ROWS * HALF), ROWS, HALF]
    LAYOUT: gl.constexpr = tile.layout
    return reinterpret(tile, SHAPE, LAYOUT)
