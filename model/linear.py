"""Linear layers cut over ranks, after Megatron-LM (arXiv:1909.08053): by outputs, then by inputs and summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from paceline.kernels.linear import Addend, add_linear, linear, norm_gated_linear, norm_heads_linear, norm_linear
from paceline.kernels.rotary_and_store import HeadPlaces
from paceline.kernels.streamed_linear import NO_STREAMS, Streams
from paceline.model.communicator import Communicator
from paceline.model.norm import RMSNorm
from paceline.model.parameter import Shard, ShardedParameter, ShardId, stack_shards
from paceline.model.shard_plan import Span


class MergedColumnParallelLinear(nn.Module):
    """Several linear layers of one input as one matrix; each rank computes its span of every layer's outputs.

    The checkpoint may hold the layers apart (one shard each) or stacked as here.
    """

    def __init__(self, in_features: int, out_spans: Mapping[ShardId, Span], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        rows = sum(span.padded for span in out_spans.values())
        self.weight = ShardedParameter((rows, in_features), dtype, stack_shards(out_spans, in_features))
        self.bias = ShardedParameter((rows,), dtype, stack_shards(out_spans, None)) if bias else None
        self.streams = NO_STREAMS

    def forward(self, norm: RMSNorm, x: Addend, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(the layer of norm(x + residual), x + residual): [T, the spans' padded widths] and [T, in_features]."""
        return norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, streams=self.streams)


class GatedColumnParallelLinear(MergedColumnParallelLinear):
    """The two layers of a gated activation, gate and up, with the activation (arXiv:2002.05202)."""

    def __init__(self, in_features: int, width: Span, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, {"gate": width, "up": width}, bias=bias, dtype=dtype)

    def forward(self, norm: RMSNorm, x: Addend, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(silu(gate) * up of norm(x + residual), x + residual): [T, width.padded] and [T, in_features]."""
        return norm_gated_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, streams=self.streams)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections, cut by whole heads."""

    def __init__(
        self,
        in_features: int,
        query_heads: Span,
        kv_heads: Span,
        head_dim: int,
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        kv_span = kv_heads.times(head_dim)
        spans: dict[ShardId, Span] = {"q": query_heads.times(head_dim), "k": kv_span, "v": kv_span}
        super().__init__(in_features, spans, bias=bias, dtype=dtype)

    def to_heads(
        self, norm: RMSNorm, x: Addend, residual: torch.Tensor | None, heads: HeadPlaces
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries [T, H, D] for attention of norm(x + residual), x + residual); keys and values go to the caches."""
        return norm_heads_linear(
            x, residual, norm.weight, norm.eps, self.weight, self.bias, heads, streams=self.streams
        )


@dataclass(frozen=True)
class NextNorm:
    """The norm of the residual stream that comes next."""

    norm: RMSNorm
    streams: Streams
    """What the product after it is streamed with."""


class RowParallelLinear(nn.Module):
    """A linear layer, of whose inputs each rank has a span; the partial outputs are summed over ranks."""

    def __init__(self, in_span: Span, out_features: int, *, bias: bool, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        shards: dict[ShardId, Shard] = {None: Shard((out_features, in_span.total), 1, in_span)}
        self.weight = ShardedParameter((out_features, in_span.padded), dtype, shards)
        self.bias = ShardedParameter.replicated((out_features,), dtype) if bias else None
        self.streams = NO_STREAMS
        self._comm = comm

    @property
    def adds(self) -> bool:
        """Whether the product itself can be added to the residual stream, without other ranks' or a bias."""
        return self._comm.size == 1 and self.bias is None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_span.padded] -> [T, out_features], the same on every rank."""
        out = self._comm.all_reduce(linear(x, self.weight, streams=self.streams))
        # Every rank holds the whole bias: added before the sum it would count once a rank.
        return out if self.bias is None else out.add_(self.bias)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, following: NextNorm | None
    ) -> tuple[Addend, torch.Tensor | None]:
        """(this layer's result, residual), of whose sum [T, out_features] comes a norm next, if any does.

        Or their sum already, with a part of that norm (`add_linear`).
        """
        if following is None or not self.adds:
            return self(x), residual
        norm, streams = following.norm, following.streams
        return add_linear(x, self.weight, residual, norm.weight, norm.eps, streams=self.streams, next_streams=streams)
