"""What a rank reports of its memory."""

from __future__ import annotations

import gc

import torch

from paceline.worker.memory import MEASURE_SECONDS, MemoryGauge, device_memory, memory_in_use


def test_memory_in_use_grows_with_what_is_used() -> None:
    device = torch.device("cpu")
    gc.collect()  # what other tests left must not be given back meanwhile
    before = memory_in_use(device)
    block = torch.ones(50 << 20, dtype=torch.uint8)
    assert 45 << 20 < memory_in_use(device) - before < 100 << 20
    assert memory_in_use(device) < device_memory(device)
    assert block.nbytes == 50 << 20


def test_memory_is_looked_up_once_a_second() -> None:
    now = 100.0
    sizes = iter(range(10))
    gauge = MemoryGauge(lambda: next(sizes), clock=lambda: now)
    assert [gauge.read(), gauge.read()] == [0, 0]
    now += MEASURE_SECONDS / 2
    assert gauge.read() == 0
    now += MEASURE_SECONDS / 2
    assert [gauge.read(), gauge.read()] == [1, 1]
