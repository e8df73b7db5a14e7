"""Matrix products with a weight stored as [out_features, in_features], as checkpoints have it, and what surrounds them.

A product of few rows on a GPU is a stream of the weight. On Hopper it is streamed_linear's where that was measured to
be faster, with the gated activation after it. Else, up to eight rows, it is skinny_linear's, with the norm before it
too. Of many rows, on Hopper, tiled_linear's does what comes after the product. Elsewhere each is an operation of its
own, and the product is the library's.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from paceline.kernels.rms_norm import add_rms_norm, rms_norm
from paceline.kernels.rotary_and_store import HeadPlaces, rotary_and_store
from paceline.kernels.silu_and_mul import silu_and_mul
from paceline.kernels.skinny_linear import adds_skinny, is_skinny, skinny_add_linear, skinny_linear
from paceline.kernels.streamed_linear import (
    NO_STREAMS,
    DeferredNorm,
    Streams,
    can_add,
    stream_of,
    streamed_add_linear,
    streamed_linear,
)
from paceline.kernels.tiled_linear import can_be_gated, heads_tiling, tiled_gated_linear, tiled_heads_linear

Addend = torch.Tensor | DeferredNorm
"""What a norm has added to its residual; or its sum, with most of the norm computed."""

FEW_ROWS = 16
"""Up to so many rows the CPU library's float32 product of the transposed problem is faster, at 2 rows 3 to 6 times."""


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, streams: Streams = NO_STREAMS
) -> torch.Tensor:
    """x [T, K] times the transpose of weight [N, K], plus bias [N]: [T, N], in x's dtype.

    streams: what it is streamed with at some numbers of rows, as for the operations below.
    """
    stream = stream_of(x, streams)
    if stream is not None:
        return streamed_linear(x, weight, stream, bias=bias)
    if is_skinny(x, weight):
        return skinny_linear(x, weight, bias=bias)[0]
    if x.device.type == "cpu" and x.dtype == torch.float32 and 0 < x.shape[0] <= FEW_ROWS:
        out = _weight_first(x, weight)
        return out if bias is None else out.add_(bias)
    return functional.linear(x, weight, bias)


def add_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    streams: Streams = NO_STREAMS,
    next_streams: Streams = NO_STREAMS,
) -> tuple[Addend, torch.Tensor | None]:
    """Return what a product of the norm of linear(x, weight) + residual takes for its x and residual.

    norm_weight, eps: that norm's. next_streams: what that product is streamed with.
    The sum and most of its norm are computed here where the second is streamed and the first has a kernel for that.
    """
    stream, next_stream = stream_of(x, streams), stream_of(x, next_streams)
    # In float16 rows may leave the type's range before their scale.
    if next_stream is not None and x.dtype == torch.bfloat16:
        if stream is not None and can_add(stream):
            return streamed_add_linear(x, weight, stream, residual, norm_weight, eps, next_stream), None
        if stream is None and adds_skinny(x, weight):
            weighted, total, squares = skinny_add_linear(x, weight, residual, norm_weight)
            return DeferredNorm(weighted, squares, eps, total, next_stream), None
    return linear(x, weight, streams=streams), residual


def norm_linear(
    x: Addend,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    streams: Streams = NO_STREAMS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (linear(norm(x + residual), weight, bias), x + residual); no residual counts as zero.

    x, residual: [T, K], contiguous, or as add_linear has them. norm_weight: [K], of a root-mean-square norm.
    weight: [N, K]. bias: [N].
    """
    if isinstance(x, DeferredNorm):
        return streamed_linear(x, weight, x.stream, bias=bias), x.total
    if stream_of(x, streams) is None and is_skinny(x, weight):
        return skinny_linear(x, weight, bias=bias, residual=residual, norm_weight=norm_weight, eps=eps)
    normed, total = _add_norm(x, residual, norm_weight, eps)
    return linear(normed, weight, bias, streams=streams), total


def norm_gated_linear(
    x: Addend,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    streams: Streams = NO_STREAMS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (silu(gate) * up, x + residual), where gate and up are the halves of norm_linear's result.

    weight: [2 * N, K], gate's rows before up's; the result is [T, N].
    streams: without bias of the gated product, with bias of the plain one.
    """
    if bias is None:
        if isinstance(x, DeferredNorm):
            return streamed_linear(x, weight, x.stream, gated=True), x.total
        stream = stream_of(x, streams)
        if stream is not None:
            normed, total = _add_norm(x, residual, norm_weight, eps)
            return streamed_linear(normed, weight, stream, gated=True), total
        if is_skinny(x, weight):
            return skinny_linear(x, weight, residual=residual, norm_weight=norm_weight, eps=eps, gated=True)
        if can_be_gated(x, weight):
            normed, total = _add_norm(x, residual, norm_weight, eps)
            return tiled_gated_linear(normed, weight), total
    gate_up, total = norm_linear(x, residual, norm_weight, eps, weight, bias, streams=streams)
    return silu_and_mul(gate_up), total


def norm_heads_linear(
    x: Addend,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: HeadPlaces,
    *,
    streams: Streams = NO_STREAMS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rotary_and_store of norm_linear's result, x + residual): queries [T, H, D] for attention.

    weight: [(H + 2 * K) * D, size], rows of queries, then of keys, then of values.
    """
    if isinstance(x, torch.Tensor) and stream_of(x, streams) is None:
        tiling = heads_tiling(x, weight, heads)
        if tiling is not None:
            normed, total = _add_norm(x, residual, norm_weight, eps)
            return tiled_heads_linear(normed, weight, bias, heads, tiling), total
    qkv, total = norm_linear(x, residual, norm_weight, eps, weight, bias, streams=streams)
    return rotary_and_store(qkv, heads), total


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is None:
        return rms_norm(x, weight, eps), x
    return add_rms_norm(x, residual, weight, eps)


def _weight_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same product as (weight @ x.T).T, contiguous."""
    # One column would be a matrix-vector product, which takes more than twice the time of two columns.
    rows = x if x.shape[0] > 1 else x.expand(2, -1)
    return torch.mm(weight, rows.contiguous().t())[:, : x.shape[0]].t().contiguous()
