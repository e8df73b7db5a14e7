"""Masks of grammars on a rank's logits: exactly what is forbidden is out of reach, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.errors import EngineError
from paceline.coordinator.messages import Admission, RowSampling, StepPlan, StepRows
from paceline.model.communicator import Communicator, SingleRank, run_simulated_ranks
from paceline.model.shard_plan import Span
from paceline.worker.batch_state import BatchState
from paceline.worker.ranks import RankGroup
from paceline.worker.sampler import Sampler
from paceline.worker.token_masks import mask_logits
from paceline.worker.worker import Worker

VOCAB = 259
CPU = torch.device("cpu")


def mask_of(*token_ids: int) -> bytes:
    return sum(1 << token for token in token_ids).to_bytes(-(-VOCAB // 32) * 4, "little")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_masks_its_own_ids_and_leaves_the_padding(size: int, dtype: torch.dtype) -> None:
    """Shards begin in the middle of a word and of a byte; the last ranks may have no id at all."""
    allowed = {0: {0, 7, 8, 31, 32, 129, 130, 258}, 2: {200}}
    masks = [(slot, mask_of(*ids)) for slot, ids in allowed.items()]
    rows = StepRows([2, 1, 0], [1, 1, 1], [True, True, True])
    width = -(-VOCAB // size)
    whole = torch.arange(3 * VOCAB, dtype=torch.float32).view(3, VOCAB).to(dtype)
    for rank in range(size):
        start = min(rank * width, VOCAB)
        span = Span(start, min(width, VOCAB - start), width + 3, VOCAB)
        logits = torch.full((3, span.padded), 5.0, dtype=dtype)
        logits[:, : span.length] = whole[:, start : start + span.length]
        before = logits.clone()
        mask_logits(logits, rows, masks, span)
        for row, slot in enumerate(rows.slots):
            for column in range(span.length):
                legal = slot not in allowed or start + column in allowed[slot]
                assert logits[row, column] == (before[row, column] if legal else -torch.inf)
        assert torch.equal(logits[:, span.length :], before[:, span.length :])


def test_a_mask_that_is_too_short_is_an_error() -> None:
    with pytest.raises(EngineError, match="slot 0 has 8 bytes"):
        mask_logits(torch.zeros(1, VOCAB), StepRows([0], [1], [True]), [(0, bytes(8))], Span.whole(VOCAB))


RULES = (
    RowSampling(temperature=0.0, seed=0),
    RowSampling(temperature=100.0, seed=1),
    RowSampling(temperature=3.0, seed=2, top_k=50, top_p=0.99, min_p=0.001),
    # Each of these would prefer a token that is forbidden, if it could.
    RowSampling(temperature=1.0, seed=3, logit_bias=((5, 100.0),), repetition_penalty=0.01),
    RowSampling(temperature=0.0, seed=0, presence_penalty=-2.0, frequency_penalty=-2.0, logprobs=3),
    RowSampling(temperature=1.0, seed=4, min_tokens=9, stop_ids=(100,)),
)


def choose(comm: Communicator, logits: torch.Tensor, masks: Sequence[tuple[int, bytes]]) -> tuple[list[int], Any]:
    state = BatchState(len(RULES), 64, 16, CPU)
    admissions = [Admission(slot, [5, 5, 5], 1, 2, [slot], rule) for slot, rule in enumerate(RULES)]
    slots = list(range(len(RULES)))
    rows = state.apply(StepPlan(0, admissions=admissions, rows=StepRows(slots, [1] * len(slots), [True] * len(slots))))
    width = -(-VOCAB // comm.size)
    span = Span(comm.rank * width, min(width, VOCAB - comm.rank * width), width, VOCAB)
    local = torch.full((len(RULES), width), 6e4)
    local[:, : span.length] = logits[:, span.start : span.start + span.length]
    token_ids, logprobs = Sampler(state, comm, span, VOCAB).sample(local, rows, masks)
    return token_ids.tolist(), logprobs


@pytest.mark.parametrize("legal", [(100, 101), (3, 100, 258), (258, 100)])
def test_no_rule_leads_out_of_a_mask(legal: tuple[int, ...]) -> None:
    for seed in range(20):
        logits = torch.randn(len(RULES), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
        logits[:, 5] = 30.0
        masks = [(slot, mask_of(*legal)) for slot in range(len(RULES))]
        alone, _ = choose(SingleRank(), logits, masks)
        assert set(alone) <= set(legal)
        assert alone[0] == max(legal, key=lambda token: logits[0, token])
        assert alone[5] != 100, "min_tokens holds back what the mask allows"
        for token_ids, _ in run_simulated_ranks(3, lambda comm, given=(logits, masks): choose(comm, *given)):
            assert token_ids == alone


def test_rows_without_a_mask_choose_as_before_and_logprobs_are_the_models_own() -> None:
    logits = torch.randn(len(RULES), VOCAB, generator=torch.Generator().manual_seed(1)) * 5
    free, _ = choose(SingleRank(), logits, [])
    masked, logprobs = choose(SingleRank(), logits, [(4, mask_of(17))])
    assert masked == [*free[:4], 17, free[5]]
    torch.testing.assert_close(logprobs.chosen, torch.log_softmax(logits, -1)[4, 17][None])


def test_a_mask_holds_for_its_step_alone(tiny: Callable[..., Any]) -> None:
    """Rows that stay the same have another mask in every step, or none."""
    config = EngineConfig(model=str(tiny("llama").folder), device="cpu", max_num_seqs=2, num_blocks=8)
    worker = Worker(config, RankGroup(config, environment={}))
    greedy = RowSampling(temperature=0.0, seed=0)
    admissions = [Admission(slot, [5, 6, 7 + slot], 3, 0, [slot], greedy) for slot in range(2)]
    first = StepPlan(0, admissions=admissions, rows=StepRows([0, 1], [3, 3], [True, True]))
    decode = StepRows([0, 1], [1, 1], [True, True])
    free = [worker.execute(plan).result().token_ids for plan in (first, StepPlan(1, rows=decode), StepPlan(2))]

    def only(token: int) -> bytes:
        return (1 << token).to_bytes(32, "little")

    plans = (
        StepPlan(0, admissions=admissions, rows=first.rows, masks=[(0, only(free[0][0]))]),
        StepPlan(1, rows=decode, masks=[(1, only(free[1][1]))]),
        StepPlan(2),
        StepPlan(3, masks=[(0, only(200)), (1, only(201))]),
    )
    assert [worker.execute(plan).result().token_ids for plan in plans] == [*free, [200, 201]]
