"""Runs of values stored at their places by one kernel."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
import torch

from paceline.kernels.store_runs import store_runs_reference, store_runs_triton


@pytest.mark.parametrize("store", [store_runs_reference, store_runs_triton])
@pytest.mark.parametrize(
    "runs",
    [
        {7: [5]},
        {0: [1, 2, 3], 3: [4], 4000: list(range(-1500, 1500)), 10: [], 9999: [2**31 - 1]},
        {place: [place] for place in range(0, 9000, 7)},
    ],
    ids=["one", "lengths", "many"],
)
def test_runs_are_stored_and_nothing_else_is_touched(
    store: Callable[..., None], runs: dict[int, list[int]], device: torch.device
) -> None:
    memory = torch.arange(10_000, dtype=torch.int32, device=device)
    expected = memory.clone()
    starts = [0]
    for place, values in runs.items():
        expected[place : place + len(values)] = torch.tensor(values, dtype=torch.int32)
        starts.append(starts[-1] + len(values))
    words = array("i", array("q", runs).tobytes()) + array("i", starts)
    for values in runs.values():
        words.extend(values)
    packed = torch.tensor(words, dtype=torch.int32, device=device)
    store(memory, packed, len(runs), max(map(len, runs.values())))
    assert torch.equal(memory, expected)
