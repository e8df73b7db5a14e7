"""Memory of a rank's tables, all in one piece, so that whatever a plan changes takes one copy and one kernel."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod

import torch

from paceline.kernels.store_runs import store_runs
from paceline.worker.upload import to_device

_ALIGNMENT = 64
"""Words between the beginnings of tensors are a multiple of this, which is more than any kernel looks for."""


class StateMemory:
    """Tensors of 32-bit words, zeros at first, to which the host writes runs of values that are stored together."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        sizes = [prod(shape) for shape in shapes]
        self._places = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        self._words = torch.zeros(self._places[-1], dtype=torch.int32, device=device)
        self.tensors = [
            self._words[place : place + size].view(shape)
            for place, size, shape in zip(self._places, sizes, shapes, strict=False)
        ]
        """[*shape] int32, contiguous."""
        self._run_places = array("q")
        self._run_starts = array("i", [0])
        self._values = array("i")
        self._longest = 0

    @property
    def nbytes(self) -> int:
        """Bytes it takes on the device."""
        return self._words.nbytes

    def write(self, index: int, offset: int, values: Iterable[int]) -> None:
        """Have the next `store` put values, or what has the bits of such, at a tensor's words from an offset on.

        Between two calls of `store` no word is written twice.
        """
        self._values.extend(values)
        end = len(self._values)
        self._longest = max(self._longest, end - self._run_starts[-1])
        self._run_places.append(self._places[index] + offset)
        self._run_starts.append(end)

    def write_apart(self, index: int, offset: int, stride: int, values: Sequence[int]) -> None:
        """`write` of single values, each of them stride words after the one before."""
        count, begin = len(values), len(self._values)
        place = self._places[index] + offset
        self._values.extend(values)
        self._longest = max(self._longest, 1)
        self._run_places.extend(range(place, place + count * stride, stride))
        self._run_starts.extend(range(begin + 1, begin + count + 1))

    def store(self) -> None:
        """Store what was written, in the order of the current stream; the host does not wait for it."""
        num_runs = len(self._run_places)
        if num_runs == 0:
            return
        packed = array("i", self._run_places.tobytes()) + self._run_starts + self._values
        store_runs(self._words, to_device(packed, self._words.device), num_runs, self._longest)
        del self._run_places[:], self._run_starts[1:], self._values[:]
        self._longest = 0

    def compile_stores(self) -> None:
        """Within `compile_only`, compile what `store` launches."""
        store_runs(self._words, torch.empty(1, dtype=torch.int32, device=self._words.device), num_runs=1, longest=1)
