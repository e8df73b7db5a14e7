"""One rank's worker: what its warm-up runs, and a step with and without a result for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.messages import Admission, RowSampling, StepPlan, StepRows
from paceline.worker import sampler, worker
from paceline.worker.batch_state import BatchState, StepShape
from paceline.worker.ranks import RankGroup
from paceline.worker.worker import Worker

RULES = RowSampling(temperature=1.0, seed=4, top_k=9, presence_penalty=1.0, logprobs=2)
STEPS = (
    StepPlan(0, admissions=[Admission(1, [5, 6, 7], 3, 0, [2], RULES)], rows=StepRows([1], [3], [True])),
    StepPlan(1, rows=StepRows([1], [1], [True])),
    StepPlan(2),
)


@pytest.fixture
def make_worker(tiny: Callable[..., Any]) -> Callable[[], Worker]:
    """Return a function that starts the only rank of a tiny model."""
    config = EngineConfig(model=str(tiny("llama").folder), device="cpu", max_num_seqs=3, num_blocks=8)
    return lambda: Worker(config, RankGroup(config, environment={}))


def test_a_step_is_the_same_without_a_result(
    make_worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    reporting, following = make_worker(), make_worker()
    results = [reporting.execute(plan).result() for plan in STEPS]
    assert all(len(result.token_ids) == len(result.logprobs) == 1 for result in results)

    def refuse(*_: object) -> None:
        raise AssertionError("a rank whose result nobody reads brought it to the host")

    monkeypatch.setattr(worker, "PendingResult", refuse)
    monkeypatch.setattr(sampler, "_logprobs", refuse)
    for plan in STEPS:
        following.follow(plan)
    chosen = [result.token_ids[0] for result in results]
    assert following.state.token_table[1, :6].tolist() == [5, 6, 7, *chosen]
    assert torch.equal(following.state.known_lens, reporting.state.known_lens)


@pytest.mark.parametrize(
    ("counts", "has_prefills", "has_decodes"), [([1, 1], False, True), ([5, 1], True, True), ([5, 2], True, False)]
)
def test_a_step_knows_which_kinds_of_rows_it_has(counts: list[int], has_prefills: bool, has_decodes: bool) -> None:
    state = BatchState(3, 64, 16, torch.device("cpu"))
    shape = state.apply(StepPlan(0, rows=StepRows([2, 0], counts, [True, True]))).shape
    assert shape == StepShape(sum(counts), 2, has_prefills, has_decodes)
    _, context = state.inputs(shape, [])
    assert (context.has_prefills, context.has_decodes) == (has_prefills, has_decodes)


def test_what_a_worker_has_set_aside_is_what_its_model_and_cache_take(make_worker: Callable[[], Worker]) -> None:
    worker = make_worker()
    memory = worker.memory
    # tests/conftest.py's TINY: tied embeddings of 256 rows, 2 layers of 4 heads of 16 over 2 KV heads, MLPs of 128.
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert memory.weights == 4 * (256 * 64 + 2 * layer + 64)
    assert memory.cache == 4 * 2 * 2 * 8 * 16 * 32
    tables = 4 * 3 * (512 + 512 // 16)
    assert tables < memory.workspace < 2 * tables
    assert memory.total > 1 << 28


def test_the_warm_up_sends_every_decode_row_through_all_of_the_sampler(
    make_worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is measured, and kernels are compiled, before the first request that uses them."""
    seen: dict[str, int] = {}

    def spy(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            seen[name] = max([seen.get(name, 0), *(len(a) for a in arguments if isinstance(a, torch.Tensor))])
            return original(*arguments)

        monkeypatch.setattr(owner, name, watched)

    spy(sampler, "find_cutoffs")
    spy(sampler, "_logprobs")
    spy(sampler.Sampler, "_penalise")
    make_worker()
    assert seen == {"find_cutoffs": 3, "_logprobs": 3, "_penalise": 3}
