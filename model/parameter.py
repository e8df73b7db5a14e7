"""A rank's parameter, and which parts of full checkpoint tensors go where in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from paceline.model.errors import CheckpointError
from paceline.model.shard_plan import Span

ShardId = str | None
"""Names one of the checkpoint tensors that a parameter is stacked from; None where there is one alone."""

Box = tuple[slice, ...]
"""A part of a tensor: start and stop along each dimension."""


class LoadedTensor(Protocol):
    """A full tensor of a checkpoint, of which no more is read than is asked for."""

    @property
    def name(self) -> str: ...

    @property
    def file_name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, box: Box, buffer: torch.Tensor) -> torch.Tensor:
        """The values of one box; a view of the buffer (uint8, large enough) or memory of their own."""


@dataclass(frozen=True)
class Shard:
    """Where one checkpoint tensor goes in a parameter: a span of one dimension, the others whole."""

    full_shape: tuple[int, ...]
    """Of the checkpoint tensor."""
    dim: int
    span: Span
    offset: int = 0
    """Where the span begins in the parameter, along dim."""

    def source(self, fused_offset: int = 0) -> Box:
        """The span in the checkpoint tensor, or in a fused one where the tensor's part begins at fused_offset."""
        return self._box(fused_offset + self.span.start, self.span.length)

    @property
    def target(self) -> Box:
        """The span's elements in the parameter."""
        return self._box(self.offset, self.span.length)

    @property
    def padding(self) -> Box:
        """What follows them in the parameter and stays zero; often empty."""
        return self._box(self.offset + self.span.length, self.span.padded - self.span.length)

    def _box(self, start: int, length: int) -> Box:
        box = [slice(0, size) for size in self.full_shape]
        box[self.dim] = slice(start, start + length)
        return tuple(box)


WeightLoader = Callable[["ShardedParameter", LoadedTensor, ShardId], Iterator["Copy"]]


class ShardedParameter(nn.Parameter):
    """A parameter on the meta device that knows its shards.

    `weight_loader(param, loaded, shard_id)` says which parts of a full tensor go where in it. A parameter takes no
    memory until `materialise`, so that a checkpoint can be checked before any is spent.
    """

    shards: Mapping[ShardId, Shard]
    weight_loader: WeightLoader

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        shards: Mapping[ShardId, Shard],
        *,
        weight_loader: WeightLoader | None = None,
        device: torch.device | str = "meta",
    ) -> ShardedParameter:
        # Zeros where there is padding, which nobody writes; the meta device has no values, but takes time to fill them.
        is_padded = sum(box_size(shard.target) for shard in shards.values()) < math.prod(shape)
        create = torch.zeros if is_padded and torch.device(device).type != "meta" else torch.empty
        parameter = super().__new__(cls, create(*shape, dtype=dtype, device=device), requires_grad=False)
        parameter.shards = shards
        parameter.weight_loader = weight_loader or shard_copies
        return parameter

    @classmethod
    def replicated(cls, shape: tuple[int, ...], dtype: torch.dtype) -> ShardedParameter:
        """One that every rank holds whole."""
        return cls(shape, dtype, {None: Shard(shape, 0, Span.whole(shape[0]))})

    def materialise(self, device: torch.device) -> ShardedParameter:
        """The same parameter on a device: zero where it has padding, else undefined until each element is written."""
        return ShardedParameter(self.shape, self.dtype, self.shards, weight_loader=self.weight_loader, device=device)


@dataclass(frozen=True)
class Copy:
    """A part of a full tensor and the equally large part of a parameter that it goes to."""

    tensor: LoadedTensor
    source: Box
    parameter: ShardedParameter
    target: Box

    @property
    def destination(self) -> torch.Tensor:
        """View of the parameter."""
        return self.parameter.data[self.target]

    @property
    def num_bytes(self) -> int:
        """Of the source."""
        return box_size(self.source) * self.tensor.dtype.itemsize

    @property
    def num_rows(self) -> int:
        return box_size(self.source[:1])

    def rows(self, start: int, stop: int) -> Copy:
        """The part of so many rows, counted from the first."""
        return Copy(self.tensor, _rows(self.source, start, stop), self.parameter, _rows(self.target, start, stop))

    def runs(self, most_bytes: int) -> Iterator[tuple[int, int]]:
        """Start and stop of runs of rows that are everything, none above most_bytes as long as a row is not."""
        num_rows = self.num_rows
        step = max(1, most_bytes // max(1, self.num_bytes // num_rows))
        return ((start, min(start + step, num_rows)) for start in range(0, num_rows, step))

    def pieces(self, most_bytes: int) -> Iterator[Copy]:
        """The same in such runs."""
        return (self.rows(start, stop) for start, stop in self.runs(most_bytes))


def box_size(box: Box) -> int:
    """Elements of a part."""
    return math.prod(part.stop - part.start for part in box)


def _rows(box: Box, start: int, stop: int) -> Box:
    """The rows from start to stop, counted from the box's first."""
    rows, *others = box
    return (slice(rows.start + start, rows.start + stop), *others)


def stack_shards(spans: Mapping[ShardId, Span], columns: int | None) -> dict[ShardId, Shard]:
    """Shards stacked by rows in the order given: of matrices with `columns` columns, or of vectors."""
    shards: dict[ShardId, Shard] = {}
    offset = 0
    for shard_id, span in spans.items():
        full_shape = (span.total,) if columns is None else (span.total, columns)
        shards[shard_id] = Shard(full_shape, 0, span, offset)
        offset += span.padded
    return shards


def expected_shape(parameter: ShardedParameter, shard_id: ShardId) -> tuple[int, ...]:
    """Shape of the checkpoint tensor for a shard; None of a stacked parameter is all its tensors stored as one."""
    if shard_id in parameter.shards:
        return parameter.shards[shard_id].full_shape
    shapes = [shard.full_shape for shard in parameter.shards.values()]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def shard_copies(parameter: ShardedParameter, loaded: LoadedTensor, shard_id: ShardId) -> Iterator[Copy]:
    """The usual weight_loader: this rank's part of each shard that the tensor holds.

    Raises CheckpointError where the full tensor does not have the shape that the shard is cut from.
    """
    expected = expected_shape(parameter, shard_id)
    if loaded.shape != expected:
        raise CheckpointError(f"tensor {loaded.name} has shape {list(loaded.shape)}, not {list(expected)}")
    held = [parameter.shards[shard_id]] if shard_id in parameter.shards else parameter.shards.values()
    fused_offset = 0
    for shard in held:
        if shard.span.length:
            yield Copy(loaded, shard.source(fused_offset), parameter, shard.target)
        fused_offset += shard.full_shape[shard.dim]
