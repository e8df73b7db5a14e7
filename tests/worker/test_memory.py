"""What a rank reports of its memory."""

from __future__ import annotations

import gc
import json
import mmap
from pathlib import Path

import pytest
import torch
from tiny_configs import LLAMA

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.errors import InputError
from paceline.worker.memory import (
    BESIDE_TORCH,
    GIB,
    MEASURE_SECONDS,
    MemoryGauge,
    device_memory,
    gpu_budget,
    memory_in_use,
)
from paceline.worker.ranks import RankGroup
from paceline.worker.worker import Worker


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


@pytest.mark.parametrize(
    ("others", "share", "budget"),
    [
        (0, 0.5, 50 * GIB - BESIDE_TORCH),  # all that the process holds is half of the GPU
        (40, 0.5, 50 * GIB - BESIDE_TORCH),  # a share is of the whole GPU, so that two processes may have half each
        (80, 0.5, 19 * GIB),  # where so much is not there, it is what others have left
        (0, 1.0, 99 * GIB),
    ],
)
def test_a_share_of_a_gpu_is_of_all_that_a_process_holds(others: int, share: float, budget: int) -> None:
    """On a GPU of 100 GiB, of which torch has reserved 10 and the CUDA context takes one."""
    assert gpu_budget(share, 100 * GIB, (100 - others - 1 - 10) * GIB, 10 * GIB) == budget


def test_a_context_whose_angles_do_not_fit_is_refused_before_they_are_made(tmp_path: Path) -> None:
    far = {"head_dim": 2**20, "max_position_embeddings": 2**24}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | far))
    config = EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy")
    # Table, angles, cosines and sines, 4 bytes each.
    with pytest.raises(InputError, match=r"max_model_len 16777216 takes 163840\.0 GiB of host memory .*; set a lower"):
        Worker(config, RankGroup(config, environment={}))
