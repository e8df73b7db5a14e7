"""What is timed on a GPU is what was asked for, and memory is counted to the byte."""

from __future__ import annotations

import gpu_timing
import pytest
import torch
from torch.profiler import ProfilerActivity, profile


@pytest.mark.gpu
def test_calls_take_turns_equally() -> None:
    counters = [torch.zeros(4, device="cuda") for _ in range(3)]
    assert gpu_timing.seconds_a_call([lambda c=c: c.add_(1) for c in counters]) > 0
    counts = [int(counter[0]) for counter in counters]
    assert len(set(counts)) == 1
    assert counts[0] > 5


@pytest.mark.gpu
def test_data_are_restored_before_every_replay() -> None:
    counter = torch.zeros(4, device="cuda")
    gpu_timing.seconds_a_call([lambda: counter.add_(1), lambda: counter.add_(1)], prepare=counter.zero_)
    assert int(counter[0]) == 2


@pytest.mark.gpu
def test_a_longer_call_takes_longer() -> None:
    long, short = (torch.empty(size << 20, device="cuda").normal_() for size in (256, 16))
    one, other = (gpu_timing.seconds_a_call([lambda data=data: data.add_(1)]) for data in (long, short))
    assert one > 4 * other


@pytest.mark.gpu
def test_the_rate_to_compare_with_is_that_of_a_kernel() -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        gpu_timing.copy_bandwidth()
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert sum(count for name, count in counts.items() if "bitwise_not" in name) > 5  # the replays', too
    assert not [name for name in counts if "Memcpy DtoD" in name]


@pytest.mark.gpu
def test_workspace_is_the_peak_of_a_call() -> None:
    data = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    def call() -> torch.Tensor:
        first = data.repeat(6)
        return first[: 1 << 20] + data

    assert gpu_timing.workspace_bytes(call) == pytest.approx(7 << 20, abs=1 << 20)


@pytest.mark.gpu
def test_inputs_that_take_turns_outgrow_the_cache() -> None:
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    for nbytes in (1 << 20, cache, 10 * cache):
        assert gpu_timing.copies_beyond_cache(nbytes) * nbytes >= 2 * cache


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_line() -> None:
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        gpu_timing.require_gpu()
