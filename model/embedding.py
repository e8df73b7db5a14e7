"""Token embedding and output head, both cut by the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from paceline.kernels.linear import norm_linear
from paceline.kernels.streamed_linear import NO_STREAMS
from paceline.model.communicator import Communicator
from paceline.model.norm import RMSNorm
from paceline.model.parameter import ShardedParameter, stack_shards
from paceline.model.shard_plan import Span


class VocabParallelEmbedding(nn.Module):
    """Each rank looks up the ids of its span; the sum over ranks is the embedding."""

    def __init__(self, vocab: Span, width: int, *, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = ShardedParameter((vocab.padded, width), dtype, stack_shards({None: vocab}, width))
        self._vocab = vocab
        self._comm = comm

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 ids of the whole vocabulary -> [T, width], the same on every rank."""
        if self._comm.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self._vocab.start
        foreign = (local < 0) | (local >= self._vocab.length)
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._comm.all_reduce(rows.masked_fill_(foreign.unsqueeze(-1), 0))


class ParallelLMHead(nn.Module):
    """Logits of each rank's span of the vocabulary."""

    def __init__(
        self, vocab: Span, width: int, *, dtype: torch.dtype, tied_to: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__()
        self.weight = (
            ShardedParameter((vocab.padded, width), dtype, stack_shards({None: vocab}, width))
            if tied_to is None
            else tied_to.weight
        )
        self.streams = NO_STREAMS

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The final norm of x + residual [N, width], and its logits [N, vocab.padded].

        Columns from vocab.length on are padding; they are zero, not the lowest, so whoever chooses must mask them.
        """
        return norm_linear(x, residual, norm.weight, norm.eps, self.weight, streams=self.streams)[0]
