"""Matrix products of two to some hundred rows with a large weight on Hopper GPUs, in Gluon.

Such a product is a stream of the weight through the GPU. Here the tensor memory accelerator brings it into a ring of
tiles in shared memory, which is always on its way: it is asked for before the kernel waits for its input (programmatic
dependent launch, docs/gpu-step.md), and the next columns' tiles while the last columns' sums are stored. The weight is
the first matrix of the tensor cores, which take 64 rows of it, but as few as 8 columns of the second.

Where there are too few columns for all processors, the inner dimension is cut into pieces. Their programs exchange
their sums through the L2 cache, and each adds up and stores some of the rows. How a product is cut is stream_cut.py's
rule, and whether it then beats the library is measured: worker/product_tuning.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
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

from paceline.kernels.gluon_names import reinterpret, start_copy, wait_for_each_other
from paceline.kernels.launch import dependent_launch, is_hopper, launch, num_processors, shared_memory
from paceline.kernels.stream_cut import (
    ALIGNMENT,
    BUCKETS,
    MIN_ROWS,
    WEIGHT_ROWS,
    Cut,
    bucket_of,
    columns_of_tile,
    cut_product,
    num_tiles,
)
from paceline.kernels.streamed_exchange import exchange_sums
from paceline.kernels.tensor_descriptors import TensorDescriptor, describe

_WEIGHT_ROWS = gl.constexpr(WEIGHT_ROWS)
_GROUP = gl.constexpr(ALIGNMENT)
"""Gate and up columns take turns by so many: then a thread of the tensor cores has both of the same column."""


@dataclass(frozen=True)
class Stream:
    """What a product is streamed with: its cut, and what its pieces exchange their sums through (`make_exchange`)."""

    cut: Cut
    exchange: torch.Tensor


Streams = Mapping[int, Stream]
"""A stream for each bucket of rows; with other numbers of rows the product is not streamed."""
NO_STREAMS: Streams = MappingProxyType({})


def cuts_of(weight: torch.Tensor, *, gated: bool = False) -> dict[int, Cut]:
    """The cut of products with weight [N, K], or [2 * N, K], for each bucket of rows in which it can be streamed."""
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16) or not is_hopper(weight.device):
        return {}
    num_columns, size = _columns(weight, gated), weight.shape[1]
    gpu = {"processors": num_processors(weight.device), "shared_bytes": shared_memory(weight.device)}
    cuts = {bucket: cut_product(num_columns, size, bucket, gated=gated, **gpu) for bucket in BUCKETS}
    return {bucket: cut for bucket, cut in cuts.items() if cut is not None}


def make_exchange(device: torch.device) -> torch.Tensor:
    """What the products of a device exchange their sums through, 8.25 MiB on an H200.

    All that share it must run one after the other, on one stream or ordered as on one. It is filled here and left as
    it was by every product, so it must be made before a CUDA graph is recorded that uses it, and not moved after.
    """
    words = num_processors(device) * WEIGHT_ROWS * BUCKETS[-1]  # the sums of a program for each processor
    return torch.full((words,), -1, dtype=torch.int32, device=device)


def stream_of(x: torch.Tensor, streams: Streams) -> Stream | None:
    """The stream for x [T, K]; None where the product is not streamed."""
    if not x.is_cuda or x.shape[0] < MIN_ROWS:
        return None
    return streams.get(bucket_of(x.shape[0]))


def streamed_linear(
    x: torch.Tensor, weight: torch.Tensor, stream: Stream, *, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """Return x [T, K] times the transpose of weight [N, K] plus bias [N]: [T, N], accumulated in float32.

    gated: weight is [2 * N, K] and the result silu(x @ weight[:N].T) * (x @ weight[N:].T), without bias.
    All of one 16-bit type, contiguous; cut as `cuts_of` has it for at least T rows.
    """
    num_rows, size = x.shape
    num_columns = _columns(weight, gated)
    cut = stream.cut
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    items = num_tiles(num_columns, gated) * cut.pieces
    at_once = max(1, shared_memory(x.device) // cut.shared_bytes)
    pdl = dependent_launch(x.device)
    launch(
        _streamed_kernel,
        (min(items, num_processors(x.device) * at_once),),
        _describe_weight(weight, cut, gated),
        describe(x, (num_rows, size), (size, 1), (cut.rows, cut.inner)),
        x if bias is None else bias,
        stream.exchange,
        out,
        num_rows,
        num_columns,
        -(-size // (cut.inner * cut.pieces)),
        items,
        cut.rows,
        cut.inner,
        cut.stages,
        cut.pieces,
        gated,
        bias is not None,
        pdl,
        dependent=pdl,
    )
    return out


def _columns(weight: torch.Tensor, gated: bool) -> int:
    return weight.shape[0] // 2 if gated else weight.shape[0]


def _describe_weight(weight: torch.Tensor, cut: Cut, gated: bool) -> TensorDescriptor:
    """Describe weight [N, K], or [2 * N, K] as [N / 8, 2, 8, K]: 8 rows for the gate, then 8 for up."""
    num_rows, size = weight.shape
    if not gated:
        return describe(weight, (num_rows, size), (size, 1), (WEIGHT_ROWS, cut.inner))
    group = _GROUP.value
    return describe(
        weight,
        (num_rows // 2 // group, 2, group, size),
        (group * size, num_rows // 2 * size, size, 1),
        (columns_of_tile(gated) // group, 2, group, cut.inner),
    )


@gluon.jit
def _start_weight(
    weight: tma.tensor_descriptor,
    tile: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    place: gl.tuple,
    wanted: gl.tensor,
    NUM_BYTES: gl.constexpr,
    COLUMNS: gl.constexpr,
    GATED: gl.constexpr,
) -> None:
    """Have a barrier expect NUM_BYTES, and start to copy the weights of a tile of columns and a step to a stage."""
    columns, step = place
    INNER: gl.constexpr = tile.shape[1]
    mbarrier.expect(full, NUM_BYTES, pred=wanted)
    if GATED:
        SHAPE: gl.constexpr = [COLUMNS // _GROUP, 2, _GROUP, INNER]
        LAYOUT: gl.constexpr = weight.layout
        groups = reinterpret(tile, SHAPE, LAYOUT)
        start_copy(weight, [columns * (COLUMNS // _GROUP), 0, 0, step * INNER], full, groups, pred=wanted)
    else:
        start_copy(weight, [columns * COLUMNS, step * INNER], full, tile, pred=wanted)


@gluon.jit
def _place(item: gl.tensor, step: gl.tensor, piece_len: gl.tensor, PIECES: gl.constexpr) -> gl.tuple:
    """Return the tile of columns of an item, and which step of the whole inner dimension one of its steps is."""
    return item // PIECES, item % PIECES * piece_len + step


@gluon.jit
def _next(item: gl.tensor, step: gl.tensor, piece_len: gl.tensor) -> gl.tuple:
    """Return the item and step after this one."""
    ends = step + 1 == piece_len
    return gl.where(ends, item + gl.num_programs(0), item), gl.where(ends, 0, step + 1)


@gluon.jit
def _apart(sums: gl.tensor, GATED: gl.constexpr) -> gl.tuple:
    """Return the sums [columns, rows] of the gate and those of up, or twice the same."""
    if GATED:
        GROUPS: gl.constexpr = sums.shape[0] // (2 * _GROUP)
        by_group = gl.reshape(sums, [GROUPS, 2, _GROUP, sums.shape[1]])
        gate, up = gl.split(gl.permute(by_group, (0, 2, 3, 1)))
        shape: gl.constexpr = [GROUPS * _GROUP, sums.shape[1]]
        apart = (gl.reshape(gate, shape), gl.reshape(up, shape))
    else:
        apart = (sums, sums)
    return apart


@gluon.jit(do_not_specialize=["num_rows", "piece_len", "num_items"])
def _streamed_kernel(
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
    PIECES: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    """An item is a piece, of piece_len steps of INNER, of a tile of COLUMNS; programs take items in turn.

    The n-th step of a program has the n-th place in the ring, again and again from the first on. Of the sizes only
    num_columns makes variants, two: where 16 divides it, eight results are stored at once.
    """
    COLUMNS: gl.constexpr = _WEIGHT_ROWS // 2 if GATED else _WEIGHT_ROWS
    NUM_BYTES: gl.constexpr = (_WEIGHT_ROWS + ROWS) * INNER * 2
    NUM_WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, ROWS, 16])
    if PDL:
        gdc_launch_dependents()
    weights = gl.allocate_shared_memory(x.dtype, [STAGES, _WEIGHT_ROWS, INNER], layout)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, INNER], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    wait_for_each_other()
    first = gl.program_id(0)
    num_steps = (num_items - first + gl.num_programs(0) - 1) // gl.num_programs(0) * piece_len

    item = first
    step = gl.to_tensor(0)
    for stage in gl.static_range(STAGES):
        place = _place(item, step, piece_len, PIECES)
        _start_weight(
            weight, weights.index(stage), full.index(stage), place, stage < num_steps, NUM_BYTES, COLUMNS, GATED
        )
        item, step = _next(item, step, piece_len)
    if PDL:
        gdc_wait()
    item = first
    step = gl.to_tensor(0)
    for stage in gl.static_range(STAGES):
        place = _place(item, step, piece_len, PIECES)
        start_copy(x, [0, place[1] * INNER], full.index(stage), xs.index(stage), pred=stage < num_steps)
        item, step = _next(item, step, piece_len)

    done = gl.to_tensor(0)
    for current in range(first, num_items, gl.num_programs(0)):
        sums = gl.zeros([_WEIGHT_ROWS, ROWS], gl.float32, layout=sums_layout)
        for _ in range(piece_len):
            at = done % STAGES
            mbarrier.wait(full.index(at), (done // STAGES) & 1)
            sums = warpgroup_mma(weights.index(at), xs.index(at).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            # All warps are through with the step before: its place is free.
            wait_for_each_other()
            free = (done + STAGES - 1) % STAGES
            wanted = (done > 0) & (done + STAGES - 1 < num_steps)
            place = _place(item, step, piece_len, PIECES)
            _start_weight(weight, weights.index(free), full.index(free), place, wanted, NUM_BYTES, COLUMNS, GATED)
            start_copy(x, [0, place[1] * INNER], full.index(free), xs.index(free), pred=wanted)
            if done > 0:
                item, step = _next(item, step, piece_len)
            done += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        if PIECES == 1:
            gate, up = _apart(sums, GATED)
            if BIAS:
                columns = current * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, gate.type.layout))
                gate += gl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(gl.float32)[:, None]
            if GATED:
                gate = gate / (1 + gl.exp(-gate)) * up
            LANES: gl.constexpr = min(COLUMNS // 8, 32)
            out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [NUM_WARPS, 1], [1, 0])
            result = gl.convert_layout(gl.permute(gate.to(out_ptr.dtype.element_ty), (1, 0)), out_layout)
            rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
            columns = current * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, out_layout))
            real = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
            gl.store(out_ptr + rows[:, None] * num_columns + columns[None, :], result, mask=real)
        else:
            exchange_sums(
                sums, bias_ptr, exchange_ptr, out_ptr, current, num_rows, num_columns,
                COLUMNS, PIECES, GATED, BIAS,
            )  # fmt: skip
