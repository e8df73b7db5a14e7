"""Whether the ranks' shards are the checkpoint, bit for bit: put together, copies dropped, padding cut off.

The loader is not asked: the shards come from the ranks' memory, and the checkpoint is read by the safetensors library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from paceline.model.checkpoint_tensors import CheckpointTensors
from paceline.model.communicator import Communicator
from paceline.model.decoder import CausalLM
from paceline.model.errors import CheckpointError
from paceline.model.ledger import EMBEDDING, TIED_HEAD, get_parameter
from paceline.model.parameter import Shard, ShardId
from paceline.model.shard_table import ModelPlan, ParameterPlan

_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Difference:
    """The first place at which a check failed."""

    check: str
    """`size`, `checkpoint`, `padding`, `copies`, `tied` or `forward`."""
    parameter: str
    rank: int
    index: tuple[int, ...]
    """In the full tensor of the checkpoint; of padding, in the rank's parameter."""
    found: float
    expected: float

    def __str__(self) -> str:
        if self.check == "size":
            return f"{self.parameter}: all ranks hold {self.found} of the {self.expected} rows or columns that are cut"
        if self.check == "tied":
            found = f"{self.parameter} of the checkpoint has {self.found!r} at {list(self.index)}"
            return f"{found}, and the embedding to which config.json ties it {self.expected!r}"
        against = {
            "checkpoint": "the checkpoint has",
            "padding": "padding must be",
            "copies": "the first rank that holds it has",
            "forward": "one rank alone computes",
        }[self.check]
        where = f"{self.parameter} on rank {self.rank} at {list(self.index)}"
        return f"{where}: found {self.found!r}, and {against} {self.expected!r}"


def verify_shards(model: CausalLM, plan: ModelPlan, comm: Communicator, tensors: CheckpointTensors) -> list[Difference]:
    """The first difference of each parameter that has one, found by rank 0; all ranks call this.

    Raises CheckpointError on rank 0 where the checkpoint cannot be read any more, once the others are through: they
    would wait for it.
    """
    found: list[Difference] = []
    failure: CheckpointError | None = None
    for parameter in plan.parameters:
        parts = _gather(get_parameter(model, parameter.name).data, comm)
        if comm.rank == 0 and failure is None:
            try:
                found += islice(_differences(model, parameter, parts, tensors), 1)
            except CheckpointError as error:
                failure = error
    if failure is not None:
        raise failure
    return found


def verify_tied_head(model: CausalLM, dtype: torch.dtype, tensors: CheckpointTensors) -> list[Difference] | None:
    """Whether a head beside a tied embedding equals it once both are cast: no difference or one; None without one.

    Raises CheckpointError as verify_shards does.
    """
    if not model.config.tie_word_embeddings or TIED_HEAD not in tensors:
        return None
    head, embedding = (tensors[name].to(dtype) for name in (TIED_HEAD, EMBEDDING))
    unequal = head != embedding
    if not unequal.any():
        return []
    place = _first_place(unequal)
    return [Difference("tied", TIED_HEAD, 0, place, head[place].item(), embedding[place].item())]


def _gather(values: torch.Tensor, comm: Communicator) -> list[torch.Tensor]:
    """A parameter of all ranks, on the CPU."""
    gathered = comm.all_gather(values.contiguous().view(-1).view(torch.uint8))
    return [part.view(values.dtype).view(values.shape) for part in gathered.cpu().chunk(comm.size)]


def _differences(
    model: CausalLM, parameter: ParameterPlan, parts: Sequence[torch.Tensor], tensors: CheckpointTensors
) -> Iterator[Difference]:
    for shard_id, full in _stored(model, parameter, tensors):
        shards = [by_id[shard_id] for by_id in parameter.shards]
        yield from _padding_differences(parameter.name, shards, parts)
        yield from _copy_differences(parameter.name, shards, parts)
        yield from _checkpoint_differences(parameter.name, shards, parts, full)


def _stored(
    model: CausalLM, parameter: ParameterPlan, tensors: CheckpointTensors
) -> Iterator[tuple[ShardId, torch.Tensor]]:
    """The checkpoint tensor of each shard, cut out where it is stored fused."""
    *prefix, module, kind = parameter.name.split(".")
    names: Mapping[str, str] = model.merged_modules.get(module, {})
    start = 0
    for shard_id, shard in parameter.shards[0].items():
        rows = shard.full_shape[0]
        if parameter.name in tensors:
            yield shard_id, tensors[parameter.name][start : start + rows]
        else:
            yield shard_id, tensors[".".join([*prefix, names[shard_id or ""], kind])]
        start += rows


def _padding_differences(name: str, shards: Sequence[Shard], parts: Sequence[torch.Tensor]) -> Iterator[Difference]:
    for rank, (shard, part) in enumerate(zip(shards, parts, strict=True)):
        padding = part[shard.padding]
        place = _first_difference(padding, torch.zeros_like(padding))
        if place is not None:
            index = tuple(cut.start + number for cut, number in zip(shard.padding, place, strict=True))
            yield Difference("padding", name, rank, index, padding[place].item(), 0.0)


def _copy_differences(name: str, shards: Sequence[Shard], parts: Sequence[torch.Tensor]) -> Iterator[Difference]:
    """Ranks that hold the same span must hold the same bits."""
    first_of: dict[int, torch.Tensor] = {}
    for rank, (shard, part) in enumerate(zip(shards, parts, strict=True)):
        if shard.span.length == 0:
            continue
        held = part[shard.target]
        first = first_of.setdefault(shard.span.start, held)
        place = _first_difference(held, first)
        if place is not None:
            index = _full_index(shard, place)
            yield Difference("copies", name, rank, index, held[place].item(), first[place].item())


def _checkpoint_differences(
    name: str, shards: Sequence[Shard], parts: Sequence[torch.Tensor], full: torch.Tensor
) -> Iterator[Difference]:
    """Pieces in the order of their spans, each span once, make the full tensor."""
    holders = {shard.span.start: rank for rank, shard in reversed(list(enumerate(shards))) if shard.span.length}
    pieces = [parts[rank][shards[rank].target] for _, rank in sorted(holders.items())]
    whole = torch.cat(pieces, dim=shards[0].dim)
    if whole.shape != full.shape:
        dim = shards[0].dim
        yield Difference("size", name, 0, (), whole.shape[dim], full.shape[dim])
        return
    expected = full.to(whole.dtype)
    place = _first_difference(whole, expected)
    if place is not None:
        along = place[shards[0].dim]
        rank = next(
            rank for rank in holders.values() if 0 <= along - shards[rank].span.start < shards[rank].span.length
        )
        yield Difference("checkpoint", name, rank, place, whole[place].item(), expected[place].item())


def _first_difference(found: torch.Tensor, expected: torch.Tensor) -> tuple[int, ...] | None:
    """Where two tensors first differ in their bits."""
    bits = _BITS[found.dtype.itemsize]
    # View before compare: NaN differs from itself, and 0.0 equals -0.0.
    unequal = found.contiguous().view(bits) != expected.contiguous().view(bits)
    if not unequal.any():
        return None
    return _first_place(unequal)


def _first_place(marks: torch.Tensor) -> tuple[int, ...]:
    flat = marks.flatten().to(torch.uint8).argmax()
    return tuple(int(number) for number in torch.unravel_index(flat, marks.shape))


def _full_index(shard: Shard, place: tuple[int, ...]) -> tuple[int, ...]:
    """From a place in a rank's part to the place in the full tensor."""
    return tuple(cut.start + number for cut, number in zip(shard.source(), place, strict=True))
