"""Timing on a GPU by CUDA graph replays over inputs that its L2 cache cannot hold, and the rate to compare with."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

MIN_GRAPH_S = 1e-3
"""A graph makes its calls again until it is about this long: events are good to a microsecond or so."""
MAX_ROUNDS = 64
REPLAYS_S = 0.03
"""Replays go on for about this long."""
COPY_BYTES = 1 << 30


def require_gpu() -> None:
    """End the program, in one line, where there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU, and there is none here")


def copies_beyond_cache(nbytes: int) -> int:
    """How many sets of inputs of so many bytes must take turns so that none is still in the L2 cache at its next turn.

    Together they are three times the cache, and at least two.
    """
    return max(2, -(-3 * torch.cuda.get_device_properties(0).L2_cache_size // nbytes))


def seconds_a_call(calls: Sequence[Call], prepare: Call | None = None) -> float:
    """Median seconds of one of calls, which do the same to different data, within replays of a graph of all of them.

    prepare restores the data before each replay where the calls change it; its time is not counted, and each call is
    then made once a replay.
    """
    _on_side_stream(calls, prepare)
    rounds = 1
    if prepare is None:
        rounds = min(MAX_ROUNDS, max(1, round(MIN_GRAPH_S / _elapsed(lambda: _all(calls)))))
    torch.cuda.empty_cache()  # The graph's memory is apart from what the calls above left in the allocator.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            _all(calls)

    def replay() -> float:
        if prepare is not None:
            prepare()
        return _elapsed(graph.replay)

    first = max(replay(), replay())
    replays = min(100, max(5, round(REPLAYS_S / first)))
    seconds = statistics.median(replay() for _ in range(replays))
    graph.reset()
    return seconds / (rounds * len(calls))


def copy_bandwidth() -> float:
    """Bytes a second, read and written together, of a kernel that reads random data and writes as much elsewhere.

    It writes each value inverted: a graph has a copy engine carry out plain copies, which is slower than the processors
    (2.7 against 4.3 TB/s on an H200), and what is compared with this rate runs on them.
    """
    source = torch.randint(-(2**31), 2**31 - 1, (COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_a_call([lambda: torch.bitwise_not(source, out=target)])


def workspace_bytes(call: Call) -> int:
    """Device memory that a call takes at its peak, its result included, beyond what was held before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected, both in float32. NaN where actual has one."""
    expected = expected.float()
    return float((actual.float() - expected).norm() / expected.norm())


def check_error(what: str, error: float, most: float) -> None:
    """Raise RuntimeError where an error is above most, or NaN: a wrong result is not worth timing."""
    if not error <= most:
        raise RuntimeError(f"{what} is wrong: relative error {error:.2e}, allowed {most:.0e}")


def _on_side_stream(calls: Sequence[Call], prepare: Call | None) -> None:
    """Make each call once, so that kernels are compiled and libraries have their memory before a graph is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if prepare is not None:
            prepare()
        _all(calls)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _elapsed(call: Call) -> float:
    """Seconds between events around a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3
