"""A rank's parameter, and how it takes its own slice of full checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from paceline.model.errors import CheckpointError
from paceline.model.shard_plan import Span

ShardId = str | None
"""Names one of the checkpoint tensors that a parameter is stacked from; None where there is one alone."""


class LoadedTensor(Protocol):
    """A full tensor of a checkpoint, of which only the slices asked for are read."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor: ...


@dataclass(frozen=True)
class Shard:
    """Where one checkpoint tensor goes in a parameter: a span of one dimension, the others whole."""

    full_shape: tuple[int, ...]
    """Of the checkpoint tensor."""
    dim: int
    span: Span
    offset: int = 0
    """Where the span begins in the parameter, along dim."""


WeightLoader = Callable[["ShardedParameter", LoadedTensor, ShardId], None]


class ShardedParameter(nn.Parameter):
    """A parameter on the meta device that knows its shards; `weight_loader(param, loaded, shard_id)` fills one.

    It takes no memory until `materialise`, so that a checkpoint can be checked before any is spent.
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
        # Zeros, not empty: padding is what no tensor fills.
        parameter = super().__new__(cls, torch.zeros(*shape, dtype=dtype, device=device), requires_grad=False)
        parameter.shards = shards
        parameter.weight_loader = weight_loader or copy_shard
        return parameter

    @classmethod
    def replicated(cls, shape: tuple[int, ...], dtype: torch.dtype) -> ShardedParameter:
        """One that every rank holds whole."""
        return cls(shape, dtype, {None: Shard(shape, 0, Span.whole(shape[0]))})

    def materialise(self, device: torch.device) -> ShardedParameter:
        """The same parameter on a device, zero-filled."""
        return ShardedParameter(self.shape, self.dtype, self.shards, weight_loader=self.weight_loader, device=device)


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


def copy_shard(parameter: ShardedParameter, loaded: LoadedTensor, shard_id: ShardId) -> None:
    """The usual weight_loader: read this rank's slice, cast it, and put it in its place.

    Raises CheckpointError where the full tensor does not have the shape that the shard is cut from.
    """
    expected = expected_shape(parameter, shard_id)
    if loaded.shape != expected:
        raise CheckpointError(f"tensor {loaded.name} has shape {list(loaded.shape)}, not {list(expected)}")
    if shard_id in parameter.shards:
        _copy_span(parameter, loaded, parameter.shards[shard_id], 0)
        return
    fused_offset = 0
    for shard in parameter.shards.values():
        _copy_span(parameter, loaded, shard, fused_offset)
        fused_offset += shard.full_shape[shard.dim]


def _copy_span(parameter: ShardedParameter, loaded: LoadedTensor, shard: Shard, fused_offset: int) -> None:
    """Copy a shard's span, whose whole begins at fused_offset of the loaded tensor."""
    span = shard.span
    if span.length == 0:
        return
    slices = [slice(0, size) for size in shard.full_shape]
    slices[shard.dim] = slice(fused_offset + span.start, fused_offset + span.start + span.length)
    piece = loaded[tuple(slices)]
    if parameter.dtype == torch.float16 and piece.dtype != torch.float16:
        _check_fits_float16(loaded.name, piece)
    parameter.data.narrow(shard.dim, shard.offset, span.length).copy_(piece)


def _check_fits_float16(name: str, piece: torch.Tensor) -> None:
    """float16 ends at 65504, where the other types go on to 3e38."""
    largest = piece.abs().amax().item()
    if not largest <= torch.finfo(torch.float16).max:
        raise CheckpointError(f"tensor {name} holds {largest:g}, beyond float16; choose dtype bfloat16 or float32")
