"""Matrix products of a few rows of activations with a large weight: the products of a decoding step.

Such a product is a stream of the weight through the GPU, and a step is a chain of short streams. What counts beside
bandwidth is therefore the time at which no weight is on its way: between two kernels. Two things shorten it. The norm
before a product, the residual addition before the norm and the gated activation after it are computed by the product's
own programs. And with programmatic dependent launch a kernel starts while the one before still runs and fetches its
first weights, which depend on nothing, before it waits for its input.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.launch import dependent_launch, launch, shared_memory

MAX_ROWS = 8


@dataclass(frozen=True)
class _Tile:
    """How a product is cut: columns of a program, slices of the inner dimension for its warps, length of a slice."""

    columns: int
    slices: int
    slice_len: int


def is_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `skinny_linear` is the faster way: few rows, on a GPU, in bfloat16.

    Not in float16, whose range the rows before their norm's scale may leave.
    """
    return x.is_cuda and 0 < x.shape[0] <= MAX_ROWS and x.dtype == torch.bfloat16


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the product, x + residual) of x [M, K] with the transpose of weight, accumulated in float32.

    norm_weight [K]: x + residual goes through a root-mean-square norm first, whose scale is applied to the product.
    residual [M, K] is given with norm_weight alone. bias [N] is added.
    gated: weight is [2 * N, K] and the result silu(x @ weight[:N].T) * (x @ weight[N:].T).
    All of one type, contiguous.
    """
    num_rows, size = x.shape
    num_columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    pdl = dependent_launch(x.device)
    flags = (norm_weight is not None, residual is not None, gated, bias is not None, pdl)
    tensors = (
        x,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        weight,
        x if bias is None else bias,
        out,
        total,
    )
    if num_rows == 1:
        _launch_row((*tensors, total), num_columns, size, eps, flags, adds=False)
    else:
        tile = _tile(num_columns, size, gated, shared_memory(x.device))
        launch(
            _skinny_kernel,
            (-(-num_columns // tile.columns),),
            *tensors,
            num_rows,
            num_columns,
            eps,
            size,
            MAX_ROWS,
            tile.columns,
            tile.slices,
            tile.slice_len,
            *flags,
            not x.is_cuda,
            num_warps=tile.slices,
            dependent=pdl,
        )
    return out, total


def adds_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `skinny_add_linear` takes such an x: a row, where it is the faster way."""
    return is_skinny(x, weight) and x.shape[0] == 1


def skinny_add_linear(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (total * norm_weight, total, squares), where total [1, N] is residual + skinny_linear(x, weight).

    x: [1, K]. squares: [programs, 1] float32, the sum of the squares of each program's columns of total.
    """
    num_columns, size = weight.shape
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    programs = -(-num_columns // _row_tile(num_columns, size)[0])
    squares = torch.empty((programs, 1), dtype=torch.float32, device=x.device)
    tensors = x, residual, norm_weight, weight, x, out, total, squares
    flags = (False, False, False, False, dependent_launch(x.device))
    _launch_row(tensors, num_columns, size, 0.0, flags, adds=True)
    return out, total, squares


def _launch_row(
    tensors: tuple[torch.Tensor, ...], num_columns: int, size: int, eps: float, flags: tuple[bool, ...], *, adds: bool
) -> None:
    """Launch the kernel for one row, by its order of tensors and flags, of which PDL is the last but ADDS."""
    block_n, block_k, num_warps = _row_tile(num_columns, size)
    launch(
        _row_kernel,
        (-(-num_columns // block_n),),
        *tensors,
        num_columns,
        eps,
        size,
        block_n,
        block_k,
        *flags,
        adds,
        num_warps=num_warps,
        dependent=flags[-1],
    )


@functools.cache
def _row_tile(num_columns: int, size: int) -> tuple[int, int, int]:
    """(columns, inner block, warps) for one row: a program's first weights fill about 64 registers a thread."""
    block_k = min(triton.next_power_of_2(size), 4096)
    weights = 16384 if num_columns >= 32768 else 8192
    block_n = min(max(weights // block_k, 4), 16)
    return block_n, block_k, 4 if block_n * block_k <= 8192 else 8


@functools.cache
def _tile(num_columns: int, size: int, gated: bool, most_bytes: int) -> _Tile:
    """The cut for 2 to MAX_ROWS rows: slices of 256, so many that one pass takes the inner dimension up to 2048.

    most_bytes: of shared memory, through which a pass of weights and rows goes; small GPUs lack it for slices of 256.
    """
    if num_columns >= 32768:
        return _Tile(32, 4, 128)
    slices = 8 if size > 1024 else 4
    slice_len = min(max(triton.next_power_of_2(size) // slices, 16), 256)
    if 2 * slices * slice_len * ((32 if gated else 16) + MAX_ROWS) > most_bytes:
        slice_len //= 2
    return _Tile(16, slices, slice_len)


@triton.jit
def _row_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    num_columns: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """BLOCK_N output columns of the only row, by multiply-adds.

    ADDS: they are added to those of the residual. The sum is stored, of its squares the sum, and as the result the sum
    times the norm's weight.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * SIZE
    up_rows = weight_rows + num_columns.to(tl.int64) * SIZE
    real = (columns < num_columns)[:, None]
    if PDL:
        gdc_launch_dependents()
    mask = real & (inner < SIZE)[None, :]
    weight = tl.load(weight_rows + inner[None, :], mask=mask, other=0.0)
    if GATED:
        up = tl.load(up_rows + inner[None, :], mask=mask, other=0.0)
    if NORM:
        scale = tl.load(norm_weight_ptr + inner, mask=inner < SIZE, other=0.0)
    if ADDS:
        next_scale = tl.load(norm_weight_ptr + columns, mask=columns < num_columns, other=0.0)
    if PDL:
        gdc_wait()
    if ADDS:
        old = tl.load(residual_ptr + columns, mask=columns < num_columns, other=0.0)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_N,), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK_K):
        k = start + inner
        if start > 0:
            mask = real & (k < SIZE)[None, :]
            weight = tl.load(weight_rows + k[None, :], mask=mask, other=0.0)
            if GATED:
                up = tl.load(up_rows + k[None, :], mask=mask, other=0.0)
            if NORM:
                scale = tl.load(norm_weight_ptr + k, mask=k < SIZE, other=0.0)
        x = tl.load(x_ptr + k, mask=k < SIZE, other=0.0)
        x32 = x.to(tl.float32)
        if NORM:
            if RESIDUAL:
                total = (x32 + tl.load(residual_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)).to(x.dtype)
                if tl.program_id(0) == 0:
                    tl.store(total_ptr + k, total, mask=k < SIZE)
                x32 = total.to(tl.float32)
            squares += x32 * x32
            x32 *= scale.to(tl.float32)
        acc += tl.sum(weight.to(tl.float32) * x32[None, :], axis=1)
        if GATED:
            acc_up += tl.sum(up.to(tl.float32) * x32[None, :], axis=1)
    if NORM:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / SIZE + eps)
        acc *= inverse
        acc_up *= inverse
    if BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    if ADDS:
        new = (acc.to(old.dtype).to(tl.float32) + old.to(tl.float32)).to(old.dtype)
        tl.store(total_ptr + columns, new, mask=columns < num_columns)
        acc = new.to(tl.float32)
        tl.store(squares_ptr + tl.program_id(0), tl.sum(acc * acc, axis=0))
        acc *= next_scale.to(tl.float32)
    tl.store(out_ptr + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < num_columns)


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """BLOCK_N output columns of up to BLOCK_M rows, by tensor cores, each warp over slices of the inner dimension."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inner = tl.arange(0, SLICES)[:, None] * SLICE + tl.arange(0, SLICE)[None, :]
    safe_columns = tl.minimum(columns, num_columns - 1).to(tl.int64)
    weight_rows = weight_ptr + safe_columns[None, :, None] * SIZE
    up_rows = weight_rows + num_columns.to(tl.int64) * SIZE
    if PDL:
        gdc_launch_dependents()
    weight = _load_slices(weight_rows, inner, SIZE)
    if GATED:
        up = _load_slices(up_rows, inner, SIZE)
    if NORM:
        scale = tl.load(norm_weight_ptr + inner, mask=inner < SIZE, other=0.0)
    if PDL:
        gdc_wait()
    offsets = rows.to(tl.int64)[None, :, None] * SIZE
    real = (rows < num_rows)[None, :, None]
    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M), dtype=tl.float32)
    acc_up = tl.zeros((SLICES, BLOCK_N, BLOCK_M), dtype=tl.float32)
    squares = tl.zeros((SLICES, BLOCK_M), dtype=tl.float32)
    for start in tl.static_range(0, SIZE, SLICES * SLICE):
        k = start + inner
        if start > 0:
            weight = _load_slices(weight_rows, k, SIZE)
            if GATED:
                up = _load_slices(up_rows, k, SIZE)
            if NORM:
                scale = tl.load(norm_weight_ptr + k, mask=k < SIZE, other=0.0)
        mask = real & (k < SIZE)[:, None, :]
        x = tl.load(x_ptr + offsets + k[:, None, :], mask=mask, other=0.0)
        if NORM:
            if RESIDUAL:
                residual = tl.load(residual_ptr + offsets + k[:, None, :], mask=mask, other=0.0)
                x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
                if tl.program_id(0) == 0:
                    tl.store(total_ptr + offsets + k[:, None, :], x, mask=mask)
            x32 = x.to(tl.float32)
            squares += tl.sum(x32 * x32, axis=2)
            x = (x32 * scale.to(tl.float32)[:, None, :]).to(x.dtype)
        acc = _dot_slices(x, weight, acc, UPCAST)
        if GATED:
            acc_up = _dot_slices(x, up, acc_up, UPCAST)
    result = tl.sum(acc, axis=0)
    result_up = tl.sum(acc_up, axis=0)
    if NORM:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / SIZE + eps)[None, :]
        result *= inverse
        result_up *= inverse
    if BIAS:
        result += tl.load(bias_ptr + safe_columns).to(tl.float32)[:, None]
    if GATED:
        result = result * tl.sigmoid(result) * result_up
    out = rows.to(tl.int64)[None, :] * num_columns + columns[:, None]
    real_out = (rows < num_rows)[None, :] & (columns < num_columns)[:, None]
    tl.store(out_ptr + out, result.to(out_ptr.dtype.element_ty), mask=real_out)


@triton.jit
def _load_slices(weight_rows: tl.tensor, inner: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Weights [SLICES, BLOCK_N, SLICE] of rows at weight_rows [1, BLOCK_N, 1] and inner indices [SLICES, SLICE]."""
    return tl.load(weight_rows + inner[:, None, :], mask=(inner < SIZE)[:, None, :], other=0.0)


@triton.jit
def _dot_slices(x: tl.tensor, weight: tl.tensor, acc: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """Add weight [SLICES, N, SLICE] times the transpose of x [SLICES, M, SLICE] to acc, slice by slice.

    The weight comes first since the tensor cores take 16 rows of the first matrix, but 8 columns of the second.
    """
    if UPCAST:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    return tl.dot(weight, tl.permute(x, (0, 2, 1)), acc)
