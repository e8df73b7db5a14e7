"""The kernel of streamed products (streamed_linear.py), in Gluon (Triton's language of explicit layouts).

One warp of a program does nothing but keep the tensor memory accelerator busy: it is as far ahead of the others as the
ring of tiles in shared memory has room, also over the end of a tile of columns. Each group of four warps multiplies 64
rows of the weight, of those that are on their way together, by all rows of x.
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
from paceline.kernels.stream_cut import ALIGNMENT, WEIGHT_ROWS
from paceline.kernels.streamed_exchange import exchange_sums

_WEIGHT_ROWS = gl.constexpr(WEIGHT_ROWS)
_TURN = gl.constexpr(ALIGNMENT)
"""Gate and up columns take turns by so many: then a thread of the tensor cores has both of the same column."""
_GROUP_REGISTERS = gl.constexpr(152)
_LOADER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _start_weights(
    weight: tma.tensor_descriptor,
    tiles: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    at: gl.tensor,
    place: gl.tuple,
    wanted: gl.tensor,
    NUM_BYTES: gl.constexpr,
    GROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    GATED: gl.constexpr,
) -> None:
    """Have a stage expect NUM_BYTES, and start to copy the weights of a tile of columns and a step to it."""
    tile, step = place
    mbarrier.expect(full.index(at), NUM_BYTES, pred=wanted)
    for group in gl.static_range(GROUPS):
        part = tiles.index(at * GROUPS + group)
        _start_part(weight, part, full.index(at), tile * GROUPS + group, step, wanted, COLUMNS, GATED)


@gluon.jit
def _start_part(
    weight: tma.tensor_descriptor,
    part: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    columns: gl.tensor,
    step: gl.tensor,
    wanted: gl.tensor,
    COLUMNS: gl.constexpr,
    GATED: gl.constexpr,
) -> None:
    """Start to copy a group's weights: of so many times COLUMNS columns before these, in gate and in up."""
    INNER: gl.constexpr = part.shape[1]
    if GATED:
        SHAPE: gl.constexpr = [COLUMNS // _TURN, 2, _TURN, INNER]
        LAYOUT: gl.constexpr = weight.layout
        turns = reinterpret(part, SHAPE, LAYOUT)
        start_copy(weight, [columns * (COLUMNS // _TURN), 0, 0, step * INNER], full, turns, pred=wanted)
    else:
        start_copy(weight, [columns * COLUMNS, step * INNER], full, part, pred=wanted)


@gluon.jit
def _next(item: gl.tensor, step: gl.tensor, piece_len: gl.tensor) -> gl.tuple:
    """Return the item and step after this one."""
    ends = step + 1 == piece_len
    return gl.where(ends, item + gl.num_programs(0), item), gl.where(ends, 0, step + 1)


@gluon.jit
def _place(item: gl.tensor, step: gl.tensor, piece_len: gl.tensor, PIECES: gl.constexpr) -> gl.tuple:
    """Return the tile of columns of an item, and which step of the whole inner dimension one of its steps is."""
    return item // PIECES, item % PIECES * piece_len + step


@gluon.jit
def _load(
    weight: tma.tensor_descriptor,
    x: tma.tensor_descriptor,
    ring: gl.tuple,
    sizes: gl.tuple,
    GROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    PIECES: gl.constexpr,
    GATED: gl.constexpr,
) -> None:
    """The part of the loading warp: all steps of the program's items, each in the next place of the ring.

    The weights of the first round are asked for before the kernel before has ended, which x may come from.
    """
    tiles, xs, full, empty = ring
    piece_len, num_items = sizes
    STAGES: gl.constexpr = xs.shape[0]
    INNER: gl.constexpr = xs.shape[2]
    NUM_BYTES: gl.constexpr = (GROUPS * _WEIGHT_ROWS + xs.shape[1]) * INNER * 2
    first = gl.program_id(0)
    num_steps = (num_items - first + gl.num_programs(0) - 1) // gl.num_programs(0) * piece_len
    item = first
    step = gl.to_tensor(0)
    for stage in gl.static_range(STAGES):
        place = _place(item, step, piece_len, PIECES)
        _start_weights(weight, tiles, full, stage, place, stage < num_steps, NUM_BYTES, GROUPS, COLUMNS, GATED)
        item, step = _next(item, step, piece_len)
    gdc_wait()
    item = first
    step = gl.to_tensor(0)
    for done in range(num_steps):
        at = done % STAGES
        place = _place(item, step, piece_len, PIECES)
        if done >= STAGES:
            mbarrier.wait(empty.index(at), (done // STAGES - 1) & 1)
            _start_weights(weight, tiles, full, at, place, True, NUM_BYTES, GROUPS, COLUMNS, GATED)
        start_copy(x, [0, place[1] * INNER], full.index(at), xs.index(at))
        item, step = _next(item, step, piece_len)


@gluon.jit
def _activated(sums: gl.tensor) -> gl.tensor:
    """silu(gate) * up of sums [columns of both by turns, rows]: [columns, rows]."""
    TURNS: gl.constexpr = sums.shape[0] // (2 * _TURN)
    SHAPE: gl.constexpr = [TURNS * _TURN, sums.shape[1]]
    by_turn = gl.reshape(sums, [TURNS, 2, _TURN, sums.shape[1]])
    gate, up = gl.split(gl.permute(by_turn, (0, 2, 3, 1)))
    gate = gl.reshape(gate, SHAPE)
    return gate / (1 + gl.exp(-gate)) * gl.reshape(up, SHAPE)


@gluon.jit
def _multiply(
    INDEX: gl.constexpr,
    ring: gl.tuple,
    sizes: gl.tuple,
    results: gl.tuple,
    GROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    PIECES: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
) -> None:
    """The part of a group of warps, of this index: its columns of every item of the program."""
    tiles, xs, full, empty = ring
    piece_len, num_items = sizes
    bias_ptr, exchange_ptr, out_ptr, num_rows, num_columns = results
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    done = gl.to_tensor(0)
    for current in range(gl.program_id(0), num_items, gl.num_programs(0)):
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
        number = current // PIECES * GROUPS + INDEX
        if PIECES == 1:
            if GATED:
                sums = _activated(sums)
            if BIAS:
                columns = number * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, sums.type.layout))
                sums += gl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(gl.float32)[:, None]
            LANES: gl.constexpr = COLUMNS // 8
            out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
            result = gl.convert_layout(gl.permute(sums.to(out_ptr.dtype.element_ty), (1, 0)), out_layout)
            rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
            columns = number * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, out_layout))
            real = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
            gl.store(out_ptr + rows[:, None] * num_columns + columns[None, :], result, mask=real)
        else:
            exchange_sums(
                sums, bias_ptr, exchange_ptr, out_ptr, number * PIECES + current % PIECES, num_rows, num_columns,
                COLUMNS, PIECES, GATED, BIAS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "piece_len", "num_items"])
def streamed_kernel(
    weight: tma.tensor_descriptor,
    x: tma.tensor_descriptor,
    bias_ptr: gl.tensor,
    exchange_ptr: gl.tensor,
    out_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_columns: gl.tensor,
    piece_len: gl.tensor,
    num_items: gl.tensor,
    ROWS: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    PIECES: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
) -> None:
    """An item is a piece, of piece_len steps of INNER, of a tile of GROUPS times COLUMNS; programs take items in turn.

    Of the sizes only num_columns makes variants, two: where 16 divides it, eight results are stored at once.
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
    fence_async_shared()
    ring = (tiles, xs, full, empty)
    sizes = (piece_len, num_items)
    results = (bias_ptr, exchange_ptr, out_ptr, num_rows, num_columns)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (0, ring, sizes, results, GROUPS, COLUMNS, PIECES, GATED, BIAS)),
                (_load, (weight, x, ring, sizes, GROUPS, COLUMNS, PIECES, GATED)),
            ],
            [1],
            [_LOADER_REGISTERS],
        )
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (_multiply, (0, ring, sizes, results, GROUPS, COLUMNS, PIECES, GATED, BIAS)),
                (_multiply, (1, ring, sizes, results, GROUPS, COLUMNS, PIECES, GATED, BIAS)),
                (_multiply, (2, ring, sizes, results, GROUPS, COLUMNS, PIECES, GATED, BIAS)),
                (_load, (weight, x, ring, sizes, GROUPS, COLUMNS, PIECES, GATED)),
            ],
            [4, 4, 1],
            [_GROUP_REGISTERS, _GROUP_REGISTERS, _LOADER_REGISTERS],
        )
