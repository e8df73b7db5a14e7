"""The kernel of products of many rows (tiled_linear.py), in Gluon (Triton's language of explicit layouts).

Every processor runs one program, which takes tiles of the result in turn. One warp has the tensor memory accelerator
fill a ring in shared memory, each stage with 64 of the inner dimension: of 128 rows of x, and of a tile's rows of the
weight. Two groups of four warps multiply 64 rows of x each by the rows of the weight, which they share.

The second group goes through a tile some steps behind the first. So while one of them finishes its results, the other
keeps the tensor cores busy, and yet both read the same weights, which come from the L2 cache once for both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.gluon_names import HALF, reinterpret, start_copy
from paceline.kernels.tiled_results import store_activated, store_heads

GROUPS = 2
GROUP_ROWS = 64
INNER = 64
"""Of the inner dimension in a stage: 128 bytes, the width of the swizzle."""
TURN = 32
"""Rows of the weight within which they lie in another order than in the tensor: see tiled_results.py."""

_GROUPS = gl.constexpr(GROUPS)
_GROUP_ROWS = gl.constexpr(GROUP_ROWS)
_TURN = gl.constexpr(TURN)
_LEAD = gl.constexpr(3)
"""Steps that the first group is ahead of the second. Less than the stages of any ring, or it would wait for itself."""
_GROUP_REGISTERS = gl.constexpr(232)
_LOADER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _tile_at(number: gl.tensor, order: gl.tuple) -> gl.tuple:
    """Row and column of a tile. They are gone through in bands of `band` rows of tiles: what those share is cached."""
    num_down, num_across, band = order
    first = number // (band * num_across) * band
    within = number % (band * num_across)
    height = gl.minimum(num_down - first, band)
    return first + within % height, within // height


@gluon.jit
def _after(at: gl.tensor, phase: gl.tensor, STAGES: gl.constexpr) -> gl.tuple:
    """The stage after this one, and the parity of the round that it is in."""
    last = at == STAGES - 1
    return gl.where(last, 0, at + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _start_weights(
    weight: tma.tensor_descriptor,
    tiles: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    at: gl.tensor,
    place: gl.tuple,
    GATED: gl.constexpr,
) -> None:
    """Have a stage expect all its bytes, and start to copy a column's rows of the weight to it, in two halves.

    Of a gated product one half is gate's, and the other the same of up.
    """
    column, num_columns, step = place
    COLUMNS: gl.constexpr = tiles.shape[1] * 2
    NUM_BYTES: gl.constexpr = (_GROUPS * _GROUP_ROWS + COLUMNS) * HALF * 2
    SHAPE: gl.constexpr = [COLUMNS // (2 * _TURN), 4, 4, 2, HALF]
    LAYOUT: gl.constexpr = weight.layout
    mbarrier.expect(full.index(at), NUM_BYTES)
    if GATED:
        first = column * (COLUMNS // 2)
        second = num_columns + first
    else:
        first = column * COLUMNS
        second = first + COLUMNS // 2
    for half in gl.static_range(2):
        row = second if half else first
        view = reinterpret(tiles.index(2 * at + half), SHAPE, LAYOUT)
        start_copy(weight, [row // _TURN, 0, 0, 0, step * HALF], full.index(at), view)


@gluon.jit
def _load(
    weight: tma.tensor_descriptor,
    x: tma.tensor_descriptor,
    ring: gl.tuple,
    num_columns: gl.tensor,
    num_steps: gl.tensor,
    order: gl.tuple,
    GATED: gl.constexpr,
) -> None:
    """The part of the loading warp: all steps of all the program's tiles, each in the next stage of the ring.

    The weights of the first round are asked for before the kernel before has ended, which x may come from.
    """
    tiles, xs, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    HALVES: gl.constexpr = [2 * STAGES, tiles.shape[1] // 2, HALF]
    LAYOUT: gl.constexpr = tiles.layout
    halves = reinterpret(tiles, HALVES, LAYOUT)
    _, column = _tile_at(gl.program_id(0), order)
    for stage in gl.static_range(STAGES):  # no product has fewer steps
        _start_weights(weight, halves, full, stage, (column, num_columns, stage), GATED)
    ahead = gl.to_tensor(STAGES)  # steps of the first tile whose weights are on their way
    gdc_wait()
    at = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for number in range(gl.program_id(0), order[0] * order[1], gl.num_programs(0)):
        row, column = _tile_at(number, order)
        for step in range(num_steps):
            if ahead > 0:
                ahead -= 1
            else:
                mbarrier.wait(empty.index(at), phase ^ 1)
                _start_weights(weight, halves, full, at, (column, num_columns, step), GATED)
            for group in gl.static_range(_GROUPS):
                first = (row * _GROUPS + group) * _GROUP_ROWS
                start_copy(x, [first, step * HALF], full.index(at), xs.index(at * _GROUPS + group))
            at, phase = _after(at, phase, STAGES)


@gluon.jit
def _add_steps(
    sums: gl.tensor,
    at: gl.tensor,
    phase: gl.tensor,
    num_steps: gl.tensor,
    ring: gl.tuple,
    INDEX: gl.constexpr,
) -> gl.tuple:
    """Add to the sums the products of so many steps; each time, the step before is let go of."""
    tiles, xs, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    for _ in range(num_steps):
        before = gl.where(at == 0, STAGES - 1, at - 1)
        mbarrier.wait(full.index(at), phase)
        sums = warpgroup_mma(xs.index(at * _GROUPS + INDEX), tiles.index(at).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(empty.index(before))
        at, phase = _after(at, phase, STAGES)
    return sums, at, phase


@gluon.jit
def _multiply(
    INDEX: gl.constexpr,
    ring: gl.tuple,
    lead: gl.shared_memory_descriptor,
    num_steps: gl.tensor,
    order: gl.tuple,
    results: gl.tuple,
    HEAD_DIM: gl.constexpr,
    NORM: gl.constexpr,
    BIAS: gl.constexpr,
) -> None:
    """The part of a group of warps, of this index: its rows of all the program's tiles."""
    tiles, xs, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    COLUMNS: gl.constexpr = tiles.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    at = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for number in range(gl.program_id(0), order[0] * order[1], gl.num_programs(0)):
        if INDEX > 0:
            mbarrier.wait(lead, turn)
        zeros = gl.zeros([_GROUP_ROWS, COLUMNS], gl.float32, layout=layout)
        mbarrier.wait(full.index(at), phase)
        sums = warpgroup_mma(xs.index(at * _GROUPS + INDEX), tiles.index(at).permute((1, 0)), zeros, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        at, phase = _after(at, phase, STAGES)
        if INDEX == 0:
            sums, at, phase = _add_steps(sums, at, phase, _LEAD - 1, ring, INDEX)
            mbarrier.arrive(lead)
            sums, at, phase = _add_steps(sums, at, phase, num_steps - _LEAD, ring, INDEX)
        else:
            sums, at, phase = _add_steps(sums, at, phase, num_steps - 1, ring, INDEX)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(gl.where(at == 0, STAGES - 1, at - 1)))
        row, column = _tile_at(number, order)
        row = (row * _GROUPS + INDEX) * _GROUP_ROWS
        if HEAD_DIM == 0:
            store_activated(sums, row, column, results)
        else:
            store_heads(sums, row, column, results, HEAD_DIM, NORM, BIAS)
        turn ^= 1


@gluon.jit
def _multiply_tiles(
    weight: tma.tensor_descriptor,
    x: tma.tensor_descriptor,
    num_columns: gl.tensor,
    num_steps: gl.tensor,
    order: gl.tuple,
    results: gl.tuple,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    NORM: gl.constexpr,
    BIAS: gl.constexpr,
) -> None:
    """What both kernels do: programs take tiles of COLUMNS rows of the weight by 128 rows of x in turn.

    HEAD_DIM is 0 where the results are those of a gated product, which has num_columns.
    """
    gdc_launch_dependents()
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(x.dtype, [STAGES, COLUMNS, HALF], layout)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * _GROUPS, _GROUP_ROWS, HALF], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    lead = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=_GROUPS)
    mbarrier.init(lead, count=1)
    fence_async_shared()
    ring = (tiles, xs, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (0, ring, lead, num_steps, order, results, HEAD_DIM, NORM, BIAS)),
            (_multiply, (1, ring, lead, num_steps, order, results, HEAD_DIM, NORM, BIAS)),
            (_load, (weight, x, ring, num_columns, num_steps, order, HEAD_DIM == 0)),
        ],
        [4, 1],
        [_GROUP_REGISTERS, _LOADER_REGISTERS],
    )


@gluon.jit(do_not_specialize=["num_rows", "num_steps", "num_down", "num_across", "band"])
def tiled_gated_kernel(
    weight: tma.tensor_descriptor,
    x: tma.tensor_descriptor,
    out_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_columns: gl.tensor,
    num_steps: gl.tensor,
    num_down: gl.tensor,
    num_across: gl.tensor,
    band: gl.tensor,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """out [num_rows, num_columns] = silu(x @ gate.T) * (x @ up.T)."""
    order = (num_down, num_across, band)
    results = (out_ptr, num_rows, num_columns)
    _multiply_tiles(weight, x, num_columns, num_steps, order, results, COLUMNS, STAGES, 0, False, False)


@gluon.jit(do_not_specialize=["num_rows", "num_steps", "num_down", "num_across", "band"])
def tiled_heads_kernel(
    weight: tma.tensor_descriptor,
    x: tma.tensor_descriptor,
    bias_ptr: gl.tensor,
    q_norm_ptr: gl.tensor,
    k_norm_ptr: gl.tensor,
    positions_ptr: gl.tensor,
    cos_sin_ptr: gl.tensor,
    slot_mapping_ptr: gl.tensor,
    query_ptr: gl.tensor,
    k_cache_ptr: gl.tensor,
    v_cache_ptr: gl.tensor,
    num_queries: gl.tensor,
    num_keys: gl.tensor,
    eps: gl.tensor,
    num_rows: gl.tensor,
    num_steps: gl.tensor,
    num_down: gl.tensor,
    num_across: gl.tensor,
    band: gl.tensor,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    NORM: gl.constexpr,
    BIAS: gl.constexpr,
) -> None:
    """Heads of x @ weight.T + bias to their places: num_queries columns of queries, num_keys of keys, then values."""
    order = (num_down, num_across, band)
    norms = (q_norm_ptr, k_norm_ptr)
    places = (positions_ptr, cos_sin_ptr, slot_mapping_ptr)
    outs = (query_ptr, k_cache_ptr, v_cache_ptr, num_queries, num_keys)
    results = (bias_ptr, norms, places, outs, num_rows, eps)
    _multiply_tiles(weight, x, 0, num_steps, order, results, COLUMNS, STAGES, HEAD_DIM, NORM, BIAS)
