"""What a rank reports of its memory."""

from __future__ import annotations

import gc
import mmap

import torch

from paceline.worker.memory import MEASURE_SECONDS, MemoryGauge, device_memory, memory_in_use


def test_memory_in_use_grows_with_what_is_used() -> None:
    device = torch.device("cpu")
    gc.collect()  # what other tests left must not be given back meanwhile
    before = memory_in_use(device)
    with mmap.mmap(-1, 50 << 20) as block:  # a tensor may get memory that an earlier one left behind
        block.write(bytes(len(block)))
        assert memory_in_use(device) - before > 45 << 20
    assert memory_in_use(device) < device_memory(device)


def test_memory_is_looked_up_once_a_second() -> None:
    now = 100.0
    sizes = iter(range(10))
    gauge = MemoryGauge(lambda: next(sizes), clock=lambda: now)
    assert [gauge.read(), gauge.read()] == [0, 0]
    now += MEASURE_SECONDS / 2
    assert gauge.read() == 0
    now += MEASURE_SECONDS / 2
    assert [gauge.read(), gauge.read()] == [1, 1]
