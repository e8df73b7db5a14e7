"""The second half of the ledger, kept while weights are written: each element of each parameter exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from paceline.model.parameter import Box, Copy, ShardedParameter, box_size


class Coverage:
    """Notes every write into one rank's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._written: dict[nn.Parameter, list[Box]] = {parameter: [] for parameter in self._names}

    def record(self, copy: Copy) -> None:
        """Note that a copy was carried out."""
        self._written[copy.parameter].append(copy.target)

    def faults(self) -> list[str]:
        """What is wrong with each parameter of which not all elements, or padding, or some twice, were written."""
        faults = []
        for parameter, name in self._names.items():
            if not isinstance(parameter, ShardedParameter):
                raise TypeError(f"{name} must be a ShardedParameter, not {type(parameter).__name__}")
            faults += [f"parameter {name} {fault}" for fault in _faults(parameter, self._written[parameter])]
        return faults


def _faults(parameter: ShardedParameter, written: list[Box]) -> list[str]:
    """Nothing outside the shards, no two overlap, and as many elements as the shards have: so each exactly once."""
    targets = [shard.target for shard in parameter.shards.values()]
    if _joined(written) == _joined(targets):
        return []  # the same elements, and as often; what follows takes longer, and knows what to say
    outside = [box for box in written if not any(_lies_in(box, target) for target in targets)]
    twice = list(_overlapping_pairs(written))
    faults = [f"was written outside its shards, at {_text(box)}" for box in outside]
    faults += [f"was written twice, at {_text(first)} and {_text(second)}" for first, second in twice]
    wanted, got = sum(map(box_size, targets)), sum(map(box_size, written))
    if got != wanted and not faults:
        faults.append(f"of shape {list(parameter.shape)} got {got} of the {wanted} elements it needs")
    return faults


def _joined(boxes: Iterable[Box]) -> list[Box]:
    """The same elements in fewer boxes: those of the same columns whose rows follow each other become one."""
    joined: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0].start):
        rows, *columns = box
        if joined and joined[-1][0].stop == rows.start and joined[-1][1:] == box[1:]:
            rows = slice(joined.pop()[0].start, rows.stop)
        if rows.start < rows.stop:
            joined.append((rows, *columns))
    return joined


def _lies_in(inner: Box, outer: Box) -> bool:
    return all(a.start >= b.start and a.stop <= b.stop for a, b in zip(inner, outer, strict=True))


def _overlapping_pairs(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """A box is compared only with those that begin before its last row: a large parameter has hundreds."""
    ordered = sorted(boxes, key=lambda box: box[0].start)
    for index, first in enumerate(ordered):
        for other in range(index + 1, len(ordered)):
            if ordered[other][0].start >= first[0].stop:
                break
            if _overlap(first, ordered[other]):
                yield first, ordered[other]


def _overlap(first: Box, second: Box) -> bool:
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(first, second, strict=True))


def _text(box: Box) -> str:
    return f"[{', '.join(f'{part.start}:{part.stop}' for part in box)}]"
