"""CUDA graphs of whole steps: what a step launches is recorded once for its shape, and then started as one.

Launching some two hundred kernels one by one takes the host longer than a small model takes to run them. A graph's
shape is a step's, rounded up; what a step does beyond its shape is read on the device, and rows and tokens past the
step's end are padding that writes nowhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from paceline.worker.batch_state import BatchState, StepShape

Result = TypeVar("Result")

MAX_TOKENS = 2048
"""Beyond, a step takes the GPU so long that launching it costs nothing."""


class StepGraphs(Generic[Result]):
    """The graphs of one body on one rank; all share a pool of memory, for only one of them runs at a time."""

    def __init__(
        self,
        body: Callable[[StepShape], Result],
        state: BatchState,
        max_tokens: int,
        pool: tuple[int, int],
    ) -> None:
        """body launches a step of a shape from what state holds, and returns its result, tensors that stay in place."""
        self._body = body
        self._state = state
        self._device = state.device
        self._row_sizes = row_sizes(state.num_slots)
        self._token_sizes = token_sizes(min(max_tokens, MAX_TOKENS))
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Result]] = {}
        self._pool: Any = pool  # torch has no name for its type
        self._stream = torch.cuda.Stream(self._device)

    def capture_decodes(self) -> None:
        """Record the decoding steps of all sizes, the largest first, whose memory the others then share."""
        for size in reversed(self._row_sizes):
            self._capture(StepShape(size, size, has_prefills=False))

    def run(self, shape: StepShape) -> Result | None:
        """Start a step and return its result, which the next one overwrites; None where it is too large for a graph.

        Whoever uses it must be ordered on the current stream.
        """
        rounded = self._round(shape)
        if rounded is None:
            return None
        if rounded not in self._graphs:
            self._capture(rounded)
        graph, result = self._graphs[rounded]
        graph.replay()
        return result

    def _round(self, shape: StepShape) -> StepShape | None:
        rows = _at_least(self._row_sizes, shape.num_rows)
        if not shape.has_prefills:
            return None if rows is None else StepShape(rows, rows, has_prefills=False)
        tokens = _at_least(self._token_sizes, shape.num_tokens)
        # Few sizes of rows, since there is one graph for each pair.
        most = self._row_sizes[-1]
        rows = _at_least([1, min(16, most), most], shape.num_rows)
        if rows is None or tokens is None:
            return None
        return StepShape(tokens, rows, has_prefills=True)

    def _capture(self, shape: StepShape) -> None:
        with self._state.without_rows():
            self._body(shape)  # compiles what is not yet: a recording may not wait for that
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
    """Numbers of tokens of steps with prompts that have graphs, ascending: at most a third is padding."""
    sizes = [size for power in range(4, 12) for size in (1 << power, 3 << (power - 1))]
    return [*(size for size in sorted(sizes) if size < max_tokens), max_tokens]


def _at_least(sizes: list[int], wanted: int) -> int | None:
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
