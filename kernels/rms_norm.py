"""Root-mean-square layer normalisation (Zhang & Sennrich, arXiv 1910.07467), alone and after a residual addition."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.launch import dependent_launch, launch

_ELEMENTS_PER_PROGRAM = 1024
"""Short rows share a program up to this many elements."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps), the mean over the last dimension, as a new contiguous tensor.

    Computed in float32 and rounded to x's dtype before the multiplication by the weight, as in transformers.

    x: [T, N], contiguous. weight: [N], of x's dtype.
    """
    return rms_norm_triton(x, weight, eps) if x.is_cuda else rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual) as new tensors.

    The sum is rounded to x's dtype, and the norm is that of the rounded sum.

    x, residual: [T, N], contiguous. weight: [N]. All of one dtype.
    """
    if x.is_cuda:
        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in plain PyTorch."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale).to(x.dtype) * weight


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in plain PyTorch."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` by a Triton kernel."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` by a Triton kernel."""
    return _launch(x, residual, weight, eps)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    num_rows, size = x.shape
    block, block_rows, num_warps = _tile(size)
    pdl = dependent_launch(x.device)
    launch(
        _rms_norm_kernel,
        (-(-num_rows // block_rows),),
        x,
        x if residual is None else residual,
        weight,
        out,
        total,
        num_rows,
        eps,
        size,
        block_rows,
        block,
        residual is not None,
        pdl,
        num_warps=num_warps,
        dependent=pdl,
    )
    return out, total


@functools.cache
def _tile(size: int) -> tuple[int, int, int]:
    """Return (columns, rows, warps) of a program for rows of `size`."""
    block = triton.next_power_of_2(size)
    block_rows = max(1, _ELEMENTS_PER_PROGRAM // block)
    return block, block_rows, min(max(block * block_rows // 512, 1), 16)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total_ptr: tl.tensor,
    num_rows: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """BLOCK_ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < SIZE)
    offsets = rows * SIZE + columns
    if PDL:
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    if RESIDUAL:
        residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + offsets, x, mask=mask)
    tl.store(out_ptr + offsets, _normalise(x, weight, eps, SIZE), mask=mask)


@triton.jit
def _normalise(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return the norm of the rows of x, whose columns past SIZE are zero."""
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / SIZE + eps)
    normed = (x32 * scale[:, None]).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
