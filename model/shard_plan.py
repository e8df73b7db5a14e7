"""Which part of each dimension a rank holds: plain arithmetic, and the only place that knows.

Any model runs at any number of ranks. All ranks have equal shapes; where a dimension does not divide, the last ranks
hold fewer real elements and zeros after them, which add nothing to any result.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.model.config import ModelConfig
from paceline.model.errors import ModelConfigError

ALIGNMENT = 8
"""An uneven MLP or vocabulary shard is rounded up to a multiple of this: 16 bytes of bfloat16, which fast matrix
multiplication wants of every row."""


@dataclass(frozen=True)
class Span:
    """A rank's part of a dimension: elements [start, start + length) of the whole, then zeros up to `padded`."""

    start: int
    length: int
    padded: int
    total: int
    """Elements of the whole dimension."""

    def times(self, width: int) -> Span:
        """The span of elements where each of this span's items (heads) is `width` elements."""
        return Span(self.start * width, self.length * width, self.padded * width, self.total * width)

    @staticmethod
    def whole(total: int) -> Span:
        """The span of a rank that holds everything."""
        return Span(0, total, total, total)


@dataclass(frozen=True)
class RankShards:
    """The spans of one rank."""

    query_heads: Span
    kv_heads: Span
    mlp: Span
    vocab: Span


@dataclass(frozen=True)
class ShardPlan:
    """How a model is cut over tp ranks.

    Attention is cut by whole heads, and a query head sits on a rank with its KV head. With K KV heads and g query heads
    to each:

    - tp <= K: a rank holds ceil(K / tp) KV heads, and all of their query heads.
    - tp > K: each KV head is copied to tp // K ranks, which share out its query heads, ceil(g / (tp // K)) a rank.
      Ranks left over hold no head.
    """

    config: ModelConfig
    tp: int

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ModelConfigError(f"tensor_parallel_size must be at least 1, got {self.tp}")

    @property
    def kv_copies(self) -> int:
        """Ranks that hold each KV head."""
        return max(1, self.tp // self.config.num_key_value_heads)

    def rank(self, rank: int) -> RankShards:
        """All spans of a rank."""
        return RankShards(self.query_heads(rank), self.kv_heads(rank), self.mlp(rank), self.vocab(rank))

    def kv_heads(self, rank: int) -> Span:
        """KV heads; the cache of every rank holds `padded` of them."""
        total = self.config.num_key_value_heads
        return _cut(total, _ceil_div(total, self.tp), rank // self.kv_copies)

    def query_heads(self, rank: int) -> Span:
        """Query heads; `padded` is the same multiple of the KV heads' `padded` on every rank."""
        heads, kv = self.config.num_attention_heads, self.kv_heads(rank)
        group = heads // kv.total
        if self.kv_copies == 1:
            return kv.times(group)
        within = _cut(group, _ceil_div(group, self.kv_copies), rank % self.kv_copies)
        if kv.length == 0:
            return Span(heads, 0, within.padded, heads)
        return Span(kv.start * group + within.start, within.length, within.padded, heads)

    def mlp(self, rank: int) -> Span:
        """Rows of gate and up projection, columns of the down projection."""
        return self._aligned(self.config.intermediate_size, rank)

    def vocab(self, rank: int) -> Span:
        """Rows of the embedding and the head."""
        return self._aligned(self.config.vocab_size, rank)

    def _aligned(self, total: int, rank: int) -> Span:
        size = _ceil_div(total, self.tp)
        if total % self.tp:
            size = _ceil_div(size, ALIGNMENT) * ALIGNMENT
        return _cut(total, size, rank)


def _cut(total: int, size: int, index: int) -> Span:
    """The index-th piece of `size` elements; the last ones are short or empty."""
    start = min(index * size, total)
    return Span(start, min(size, total - start), size, total)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
