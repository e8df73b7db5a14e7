"""The kernel of streamed products (streamed_linear.py), in Gluon (Triton's language of explicit layouts).

One warp of a program does nothing but keep the tensor memory accelerator busy: it is as far ahead of the others as the
ring of tiles in shared memory has room, also over the end of a tile of columns. Each group of four warps multiplies 64
rows of the weight, of those that are on their way together, by all rows of x. One more warp finds the scales of x's
rows, where it lacks them (streamed_norm.py).
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

from paceline.kernels.gluon_names import reinterpret, start_copy
from paceline.kernels.stream_cut import WEIGHT_ROWS
from paceline.kernels.streamed_exchange import exchange_sums, layout_of_share
from paceline.kernels.streamed_norm import add_to_stream, find_scales
from paceline.kernels.streamed_results import TURN, finish, layout_of_results, places_of, unfold
from paceline.kernels.streamed_rows import first_row_of, half_of

_WEIGHT_ROWS = gl.constexpr(WEIGHT_ROWS)
_TURNS = gl.constexpr(WEIGHT_ROWS // (2 * TURN.value))
_GROUP_REGISTERS = gl.constexpr(152)
_WARP_REGISTERS = gl.constexpr(56)


@gluon.jit
def _start_weights(
    weight: tma.tensor_descriptor,
    tiles: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    at: gl.tensor,
    tile: gl.tensor,
    step: gl.tensor,
    wanted: gl.tensor,
    NUM_BYTES: gl.constexpr,
    GROUPS: gl.constexpr,
) -> None:
    """Have a stage expect NUM_BYTES, and start to copy the weights of a tile of columns and a step to it."""
    INNER: gl.constexpr = tiles.shape[2]
    SHAPE: gl.constexpr = [_TURNS, 2, TURN, INNER]
    LAYOUT: gl.constexpr = weight.layout
    mbarrier.expect(full.index(at), NUM_BYTES, pred=wanted)
    for group in gl.static_range(GROUPS):
        turns = reinterpret(tiles.index(at * GROUPS + group), SHAPE, LAYOUT)
        begin = (tile * GROUPS + group) * _TURNS
        start_copy(weight, [begin, 0, 0, step * INNER], full.index(at), turns, pred=wanted)


@gluon.jit
def _load(
    weight: tma.tensor_descriptor,
    x: tma.tensor_descriptor,
    ring: gl.tuple,
    sizes: gl.tuple,
    GROUPS: gl.constexpr,
    PIECES: gl.constexpr,
) -> None:
    """The part of the loading warp: all steps of the program's items, each in the next place of the ring.

    The weights of the first round are asked for before the kernel before has ended, which x may come from.
    """
    tiles, xs, full, empty = ring
    piece_len, num_items, first_row = sizes
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    INNER: gl.constexpr = xs.shape[2]
    NUM_BYTES: gl.constexpr = (GROUPS * _WEIGHT_ROWS + ROWS) * INNER * 2
    HALF: gl.constexpr = half_of(ROWS)
    HALVES: gl.constexpr = [ROWS // HALF, HALF, INNER]
    LAYOUT: gl.constexpr = x.layout
    item = gl.program_id(1)
    step = gl.to_tensor(0)
    for stage in gl.static_range(STAGES):
        begin = item % PIECES * piece_len
        wanted = item < num_items
        _start_weights(weight, tiles, full, stage, item // PIECES, begin + step, wanted, NUM_BYTES, GROUPS)
        step += 1
        ends = step == piece_len
        item = gl.where(ends, item + gl.num_programs(1), item)
        step = gl.where(ends, 0, step)
    gdc_wait()
    done = gl.to_tensor(0)
    for current in range(gl.program_id(1), num_items, gl.num_programs(1)):
        begin = current % PIECES * piece_len
        for step in range(begin, begin + piece_len):
            at = done % STAGES
            if done >= STAGES:
                mbarrier.wait(empty.index(at), (done // STAGES - 1) & 1)
                _start_weights(weight, tiles, full, at, current // PIECES, step, True, NUM_BYTES, GROUPS)
            halves = reinterpret(xs.index(at), HALVES, LAYOUT)
            start_copy(x, [0, first_row, step * INNER], full.index(at), halves)
            done += 1


@gluon.jit
def _multiply(
    INDEX: gl.constexpr,
    ring: gl.tuple,
    sizes: gl.tuple,
    results: gl.tuple,
    norm: gl.tuple,
    stream: gl.tuple,
    GROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    PIECES: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
) -> None:
    """The part of a group of warps, of this index: its columns of every item of the program."""
    tiles, xs, full, empty = ring
    piece_len, num_items, first_row = sizes
    bias_ptr, exchange_ptr, out_ptr, num_rows, num_columns, second_half = results
    scales, scaled, num_squares = norm
    residual_ptr, norm_weight_ptr, total_ptr, squares_ptr, adds = stream
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    MAY_ADD: gl.constexpr = GROUPS == 1 and not GATED and not BIAS
    PLACES: gl.constexpr = ROWS // PIECES
    RESULTS: gl.constexpr = layout_of_share(PLACES, COLUMNS) if PIECES > 1 else layout_of_results(ROWS, GATED)
    first_place = first_row.to(gl.int64) * num_columns
    out_ptr += first_place
    residual_ptr += first_place
    total_ptr += first_place
    if MAY_ADD:
        gdc_wait()
    done = gl.to_tensor(0)
    for current in range(gl.program_id(1), num_items, gl.num_programs(1)):
        piece = current % PIECES
        tile = current // PIECES * GROUPS + INDEX
        rows, columns = places_of(RESULTS, piece * PLACES, tile * COLUMNS, second_half, PLACES, COLUMNS, ROWS)
        row_is_real = first_row + rows < num_rows
        real = row_is_real[:, None] & (columns < num_columns)[None, :]
        places = rows[:, None] * num_columns + columns[None, :]
        if MAY_ADD:  # On their way while the products are computed.
            residual = gl.load(residual_ptr + places, mask=real & (adds > 0), other=0.0)
            norm_weight = gl.load(norm_weight_ptr + columns, mask=(columns < num_columns) & (adds > 0), other=1.0)
        sums = gl.zeros([_WEIGHT_ROWS, ROWS], gl.float32, layout=layout)
        for step in range(piece_len):
            at = done % STAGES
            mbarrier.wait(full.index(at), (done // STAGES) & 1)
            sums = warpgroup_mma(tiles.index(at * GROUPS + INDEX), xs.index(at).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), pred=step > 0)  # the step before is through
            done += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES))
        if num_squares > 0:
            mbarrier.wait(scaled, 0)
            sums = sums * scales.load(gl.SliceLayout(0, layout))[None, :]
        values = unfold(sums, GATED)
        if PIECES > 1:
            area_ptr = exchange_ptr + tile * (PIECES * ROWS * _WEIGHT_ROWS)
            values = exchange_sums(values, area_ptr, piece, num_rows, second_half, PIECES)
        result = finish(values, bias_ptr, columns, num_columns, BIAS)
        if MAY_ADD:  # noqa: SIM102  Known when this is compiled, unlike the next.
            if adds > 0:
                squares = squares_ptr + tile * num_rows + first_row + rows
                result = add_to_stream(result, residual, norm_weight, total_ptr + places, squares, real, row_is_real)
        gl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=real)


@gluon.jit(do_not_specialize=["num_rows", "second_half", "piece_len", "num_items", "num_squares", "size", "adds"])
def streamed_kernel(
    weight: tma.tensor_descriptor,
    x: tma.tensor_descriptor,
    bias_ptr: gl.tensor,
    exchange_ptr: gl.tensor,
    out_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_columns: gl.tensor,
    second_half: gl.tensor,
    piece_len: gl.tensor,
    num_items: gl.tensor,
    squares_ptr: gl.tensor,
    num_squares: gl.tensor,
    size: gl.tensor,
    eps: gl.tensor,
    residual_ptr: gl.tensor,
    norm_weight_ptr: gl.tensor,
    total_ptr: gl.tensor,
    new_squares_ptr: gl.tensor,
    adds: gl.tensor,
    ROWS: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    PIECES: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
) -> None:
    """An item is a piece, of piece_len steps of INNER, of a tile of GROUPS times COLUMNS; programs take items in turn.

    The first dimension of the grid is of tiles of ROWS rows. Of the sizes none makes variants.

    num_squares, of those at squares_ptr: x lacks the scale of a norm of `size` columns, if there are any. adds: results
    are added to the stream at residual_ptr, if positive, and both are streamed_norm.py's matter.
    """
    gdc_launch_dependents()
    COLUMNS: gl.constexpr = _WEIGHT_ROWS // 2 if GATED else _WEIGHT_ROWS
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(x.dtype, [STAGES * GROUPS, _WEIGHT_ROWS, INNER], layout)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, INNER], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    scales = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    scaled = gl.allocate_shared_memory(gl.int64, [1], barriers)
    mbarrier.init(scaled, count=1)
    fence_async_shared()
    ring = (tiles, xs, full, empty)
    sizes = (piece_len, num_items, first_row_of(gl.program_id(0), num_rows, ROWS))
    results = (bias_ptr, exchange_ptr, out_ptr, num_rows, num_columns, second_half)
    norm = (scales, scaled, num_squares)
    squares = (squares_ptr, num_squares, size, eps)
    stream = (residual_ptr, norm_weight_ptr, total_ptr, new_squares_ptr, adds)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (0, ring, sizes, results, norm, stream, GROUPS, COLUMNS, PIECES, GATED, BIAS)),
                (_load, (weight, x, ring, sizes, GROUPS, PIECES)),
                (find_scales, (squares, scales, scaled, sizes[2], num_rows, second_half)),
            ],
            [1, 1],
            [_WARP_REGISTERS, _WARP_REGISTERS],
        )
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (_multiply, (0, ring, sizes, results, norm, stream, GROUPS, COLUMNS, PIECES, GATED, BIAS)),
                (_multiply, (1, ring, sizes, results, norm, stream, GROUPS, COLUMNS, PIECES, GATED, BIAS)),
                (_multiply, (2, ring, sizes, results, norm, stream, GROUPS, COLUMNS, PIECES, GATED, BIAS)),
                (_load, (weight, x, ring, sizes, GROUPS, PIECES)),
                (find_scales, (squares, scales, scaled, sizes[2], num_rows, second_half)),
            ],
            [4, 4, 1, 1],
            [_GROUP_REGISTERS, _GROUP_REGISTERS, _WARP_REGISTERS, _WARP_REGISTERS],
        )
