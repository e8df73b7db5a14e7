"""CUDA graphs of whole steps: what a step launches is recorded once for its shape, and then started as one.

Launching some three hundred kernels one by one takes the host longer than a small model takes to run them. A graph's
shape is a step's, rounded up; what a step does beyond its shape is read on the device, and rows and tokens past the
step's end are padding that writes nowhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

from paceline.kernels.stream_cut import BUCKETS
from paceline.worker.batch_state import BatchState, StepShape

Result = TypeVar("Result")

SMALL_TOKENS = 2048
"""Steps of more tokens have graphs only for numbers of tokens near one that has one: there padding costs more time
than launches."""
MAX_TOKENS = 16384
"""Beyond, a step of any model takes the GPU longer than the host takes to launch it."""


class GraphShapes:
    """The shapes that have graphs, and which of them a step takes."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._rows = row_sizes(max_rows)
        self._tokens = token_sizes(min(max_tokens, MAX_TOKENS))
        most = self._rows[-1]
        # Few sizes for steps with prompts, since there is one graph for each pair, and rows of no tokens cost little.
        self._rows_with_prompts = sorted({min(16, most), most})

    def round(self, shape: StepShape) -> StepShape | None:
        """The smallest shape that holds a step; None where it is too large, or large and not nearly full."""
        if not shape.has_prefills:
            rows = _at_least(self._rows, shape.num_rows)
            return None if rows is None else StepShape(rows, rows, has_prefills=False)
        rows = _at_least(self._rows_with_prompts, shape.num_rows)
        tokens = _at_least(self._tokens, shape.num_tokens)
        if rows is None or tokens is None:
            return None
        if tokens > SMALL_TOKENS and tokens > shape.num_tokens * 9 // 8:
            return None
        return StepShape(tokens, rows, has_prefills=True)

    def all(self) -> list[StepShape]:
        """All that `round` can give, the largest first."""
        shapes = [StepShape(rows, rows, has_prefills=False) for rows in self._rows]
        smaller = 0
        for rows in self._rows_with_prompts:
            # A step takes so many rows where it has more than the next smaller size, and more tokens than rows.
            shapes += [StepShape(tokens, rows, has_prefills=True) for tokens in self._tokens if tokens > smaller + 1]
            smaller = rows
        return sorted(shapes, key=lambda shape: (shape.num_rows, shape.num_tokens), reverse=True)

    def typical(self) -> list[StepShape]:
        """A few of them that together launch every variant of a kernel.

        Those are the powers of two, the buckets of streamed products, the smallest and the largest.
        """
        ends: set[StepShape] = set()
        for rows in self._rows_with_prompts:
            of_rows = [shape for shape in self.all() if shape.has_prefills and shape.num_rows == rows]
            ends |= {*of_rows[:1], *of_rows[-1:]}
        return [shape for shape in self.all() if shape in ends or self._is_typical(shape)]

    def _is_typical(self, shape: StepShape) -> bool:
        in_line = shape.num_tokens.bit_count() == 1 or shape.num_tokens in BUCKETS
        if shape.has_prefills:
            return in_line and shape.num_rows == self._rows_with_prompts[0]
        return in_line or shape.num_rows == self._rows[-1]


class StepGraphs(Generic[Result]):
    """The graphs of one body on one rank; all share a pool of memory, for only one of them runs at a time."""

    def __init__(
        self,
        body: Callable[[StepShape], Result],
        shortened: Callable[[], AbstractContextManager[None]],
        state: BatchState,
        max_tokens: int,
        pool: tuple[int, int],
    ) -> None:
        """body launches a step of a shape from what state holds, and returns its result, tensors that stay in place.

        shortened: within, body launches every kernel that it launches at all, but not as often.
        """
        self._body = body
        self._shortened = shortened
        self._state = state
        self._device = state.device
        self._shapes = GraphShapes(state.num_slots, max_tokens)
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Result]] = {}
        self._pool: Any = pool  # torch has no name for its type
        self._stream = torch.cuda.Stream(self._device)

    def capture_all(self) -> None:
        """Record every shape, the largest first, in whose memory the others then find room."""
        for shape in self._shapes.all():
            self._capture(shape)

    def run(self, shape: StepShape) -> Result | None:
        """Start a step and return its result, which the next one overwrites; None where it has no graph.

        Whoever uses it must be ordered on the current stream.
        """
        rounded = self._shapes.round(shape)
        if rounded is None:
            return None
        if rounded not in self._graphs:
            self._capture(rounded)
        graph, result = self._graphs[rounded]
        graph.replay()
        return result

    def _capture(self, shape: StepShape) -> None:
        # Kernels are compiled and loaded, ours and the libraries': a recording may not wait for that.
        with self._state.without_rows(), self._shortened():
            self._body(shape)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = self._body(shape)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._graphs[shape] = graph, result


def row_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that have graphs, ascending."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_rows]
    sizes += range(16, min(max_rows, 512), 16)
    return [*sizes, max_rows] if max_rows <= 512 else [*sizes, 512]


def token_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens of steps with prompts that have graphs, ascending: at most a third is padding, or a fifth."""
    sizes: list[int] = []
    for power in range(4, max_tokens.bit_length()):
        size = 1 << power
        sizes += [size, size * 3 // 2] if size < SMALL_TOKENS else [size, size * 5 // 4, size * 3 // 2, size * 7 // 4]
    return [*(size for size in sizes if size < max_tokens), max_tokens]


def _at_least(sizes: list[int], wanted: int) -> int | None:
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
