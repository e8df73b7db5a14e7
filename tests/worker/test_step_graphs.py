"""CUDA graphs: a replayed step does what the same step does launched kernel by kernel, and padding changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.messages import Admission, RowSampling, StepPlan, StepRows
from paceline.worker.batch_state import GREEDY, StepShape
from paceline.worker.ranks import RankGroup
from paceline.worker.step_graphs import GraphShapes, row_sizes, token_sizes
from paceline.worker.worker import Worker

SLOTS = 21


@pytest.mark.parametrize("most", [1, 3, 8, 9, 100, 256, 1000])
def test_there_is_a_size_for_every_number_of_rows_up_to_512(most: int) -> None:
    sizes = row_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 512)
    assert all(size <= most for size in sizes)
    padding = [min(size for size in sizes if size >= rows) - rows for rows in range(1, sizes[-1] + 1)]
    assert max(padding) < 16


@pytest.mark.parametrize("most", [1, 100, 2048, 8192])
def test_sizes_of_steps_with_prompts_waste_at_most_a_third(most: int) -> None:
    sizes = token_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for tokens in range(16, most + 1):
        assert min(size for size in sizes if size >= tokens) <= 1.5 * tokens


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 64), (3, 40), (21, 50), (256, 300)])
def test_all_shapes_are_those_that_steps_take(max_rows: int, max_tokens: int) -> None:
    shapes = GraphShapes(max_rows, max_tokens)
    steps = [StepShape(rows, rows, has_prefills=False) for rows in range(1, max_rows + 1)]
    steps += [
        StepShape(tokens, rows, has_prefills=True)
        for tokens in range(2, max_tokens + 1)
        for rows in range(1, min(tokens, max_rows + 1))
    ]
    taken = [shapes.round(step) for step in steps]
    for step, shape in zip(steps, taken, strict=True):
        assert shape is not None
        assert (shape.num_rows, shape.num_tokens) >= (step.num_rows, 0)
        assert shape.num_tokens >= step.num_tokens
        assert shape.has_prefills == step.has_prefills
    listed = shapes.all()
    assert len(listed) == len(set(listed))
    assert set(taken) == set(listed)
    assert shapes.round(StepShape(max_tokens + 1, 1, has_prefills=True)) is None
    typical = shapes.typical()
    assert set(typical) <= set(listed)
    assert len(typical) <= 22
    assert {each.num_rows.bit_length() for each in typical} == {each.num_rows.bit_length() for each in listed}


def test_large_steps_have_graphs_where_little_of_them_is_padding() -> None:
    shapes = GraphShapes(256, 8192)
    small = (2048, 2048), (2049, None), (2276, 2560), (2730, None), (2731, 3072)
    for tokens, size in (*small, (3700, 4096), (6656, 7168), (7300, 8192)):
        taken = shapes.round(StepShape(tokens, 20, has_prefills=True))
        assert (None if taken is None else taken.num_tokens) == size
    for tokens in range(2049, 8193):
        taken = shapes.round(StepShape(tokens, 2, has_prefills=True))
        assert taken is None or tokens <= taken.num_tokens <= 1.125 * tokens


def script() -> list[StepPlan]:
    """Steps of few and of many rows, with prompts, chunks of prompts and rules among them."""
    filters = RowSampling(temperature=0.8, seed=5, top_k=20, top_p=0.9)
    rules = RowSampling(temperature=0.8, seed=5, top_k=20, top_p=0.9, presence_penalty=0.5)
    warm = RowSampling(temperature=0.9, seed=7)
    choices = [GREEDY, warm, GREEDY]

    def admit(slot: int, length: int, sampling: RowSampling) -> Admission:
        return Admission(
            slot,
            [(slot * 37 + i * 11) % 256 for i in range(length)],
            length,
            0,
            range(slot * 4, slot * 4 + 4),
            sampling,
        )

    plans = [
        StepPlan(0, admissions=[admit(3, 7, GREEDY)], rows=StepRows([3], [7], [True])),
        StepPlan(1, rows=StepRows([3], [1], [True])),
        StepPlan(2),
        StepPlan(3, admissions=[admit(5, 30, warm)], rows=StepRows([3, 5], [1, 20], [True, False])),
        StepPlan(4, rows=StepRows([3, 5], [1, 10], [True, True])),
        StepPlan(5, rows=StepRows([5, 3], [1, 1], [True, True])),
    ]
    others = [slot for slot in range(SLOTS) if slot not in (3, 5)]
    admissions = [admit(slot, 1 + slot, choices[slot % 3]) for slot in others]
    lengths = [1 + slot for slot in others]
    plans.append(StepPlan(6, admissions=admissions, rows=StepRows(others, lengths, [True] * len(others))))
    everyone = StepRows(list(range(SLOTS)), [1] * SLOTS, [True] * SLOTS)
    plans += [StepPlan(7, rows=everyone), StepPlan(8), StepPlan(9)]
    for step, sampling in ((10, filters), (13, rules)):
        admissions = [admit(5, 12, sampling)]
        plans.append(StepPlan(step, admissions=admissions, rows=StepRows([0, 1, 5], [1, 1, 12], [True] * 3)))
        plans += [StepPlan(step + 1, rows=StepRows([0, 1, 5], [1, 1, 1], [True] * 3)), StepPlan(step + 2)]
    return plans


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_graphs_give_what_the_kernels_give_one_by_one(
    family: str, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=str(tiny(family).folder), device="cuda", dtype="float32", max_num_seqs=SLOTS, num_blocks=4 * SLOTS,
        max_model_len=64,
    )  # fmt: skip

    def run(worker: Worker) -> tuple[list[Any], list[torch.Tensor]]:
        for keys, values in worker._kv_caches:
            keys.zero_()
            values.zero_()
        results = [worker.execute(plan).result().token_ids for plan in script()]
        return results, [tensor.clone() for cache in worker._kv_caches for tensor in cache]

    by_graph = Worker(config, RankGroup(config, environment={}))
    assert by_graph._step_graphs is not None
    monkeypatch.setattr(Worker, "_capture_graphs", lambda _: None)
    one_by_one = Worker(config, RankGroup(config, environment={}))
    (ids, caches), (expected_ids, expected_caches) = run(by_graph), run(one_by_one)
    assert ids == expected_ids
    # The cache holds what was stored and nothing of padding, whose keys and values would show as more than zero.
    for cache, expected in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(cache == 0, expected == 0)
    again, _ = run(by_graph)
    assert again == ids


@pytest.mark.gpu
def test_nothing_is_compiled_after_the_start_has_compiled(
    tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to measure products, for the warm-up and the graphs nor for steps, with rules or without."""
    config = EngineConfig(
        model=str(tiny("qwen3").folder), device="cuda", dtype="bfloat16", max_num_seqs=SLOTS, num_blocks=4 * SLOTS,
        max_model_len=64,
    )  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    late: list[str] = []

    def note(*, repr: str, **_: object) -> None:
        late.append(repr)

    def compile_kernels(*arguments: Any, real: Callable[..., None] = Worker._compile_kernels) -> None:
        real(*arguments)
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)

    monkeypatch.setattr(Worker, "_compile_kernels", compile_kernels)
    worker = Worker(config, RankGroup(config, environment={}))
    for plan in script():
        worker.execute(plan).result()
    assert late == []
