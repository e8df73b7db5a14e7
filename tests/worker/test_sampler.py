"""The sampler: equal on any number of ranks, a row untouched by its neighbours, penalties as transformers has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.coordinator.messages import Admission, RowSampling, StepPlan, StepRows
from paceline.model.communicator import Communicator, SingleRank, run_simulated_ranks
from paceline.model.shard_plan import Span
from paceline.worker.batch_state import BatchState
from paceline.worker.pending import PendingResult
from paceline.worker.sampler import Asked, SampledLogprobs, Sampler

VOCAB = 259
CPU = torch.device("cpu")

Row = tuple[Sequence[int], int, RowSampling]
"""Known tokens, how many of them are the prompt, and the row's rules."""


def span_of(rank: int, size: int) -> Span:
    width = -(-VOCAB // size)
    start = min(rank * width, VOCAB)
    return Span(start, min(width, VOCAB - start), width, VOCAB)


def plan_of(rows: Sequence[Row]) -> StepPlan:
    """A first step in which every row, in the slot of its index, samples after its last token."""
    admissions = [
        Admission(slot, list(tokens), prompt_len, len(tokens) - 1, [slot] * 4, sampling)
        for slot, (tokens, prompt_len, sampling) in enumerate(rows)
    ]
    slots = list(range(len(rows)))
    return StepPlan(0, admissions=admissions, rows=StepRows(slots, [1] * len(rows), [True] * len(rows)))


def sample_on(
    comm: Communicator, logits: torch.Tensor, rows: Sequence[Row], *, report: bool = True
) -> tuple[list[int], SampledLogprobs | None]:
    """Sample once for the rows, with this rank's columns of the full logits [S, VOCAB]."""
    state = BatchState(len(rows), 64, 16, CPU)
    device_rows = state.apply(plan_of(rows))
    span = span_of(comm.rank, comm.size)
    # What stands in the padding must not matter: here it would win.
    local = torch.full((len(rows), span.padded), 6e4, dtype=logits.dtype)
    local[:, : span.length] = logits[:, span.start : span.start + span.length]
    token_ids, logprobs = Sampler(state, comm, span, VOCAB).sample(local, device_rows, report=report)
    return token_ids.tolist(), logprobs


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    return sample_on(SingleRank(), logits, rows)[0]


def greedy(**rules: object) -> RowSampling:
    return RowSampling(temperature=0.0, seed=0, **rules)  # type: ignore[arg-type]


MIXED_RULES = (
    greedy(),
    RowSampling(temperature=1.0, seed=1),
    RowSampling(temperature=0.7, seed=2, top_k=5),
    RowSampling(temperature=1.3, seed=3, top_p=0.8),
    RowSampling(temperature=1.0, seed=4, min_p=0.1),
    RowSampling(temperature=2.0, seed=5, top_k=20, top_p=0.9, min_p=0.01, presence_penalty=1.0),
    greedy(repetition_penalty=1.5, frequency_penalty=0.5),
    RowSampling(temperature=1.0, seed=6, logit_bias=((258, 100.0),)),
    greedy(min_tokens=10, stop_ids=(3, 258)),
    RowSampling(temperature=5.0, seed=7, logprobs=5),
)


@pytest.fixture
def mixed() -> tuple[torch.Tensor, list[Row]]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(MIXED_RULES), VOCAB, generator=generator) * 3
    rows: list[Row] = []
    for index, rules in enumerate(MIXED_RULES):
        tokens = torch.randint(0, VOCAB, (5 + index,), generator=generator).tolist()
        rows.append((tokens, 3, rules))
    return logits, rows


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_rank_chooses_what_one_rank_alone_chooses(mixed: tuple[torch.Tensor, list[Row]], size: int) -> None:
    logits, rows = mixed
    alone = sample(logits, rows)
    for token_ids, _ in run_simulated_ranks(size, lambda comm: sample_on(comm, logits, rows)):
        assert token_ids == alone


@pytest.mark.parametrize("rules", [{"logit_bias": ((3, 1.0),)}, {"min_tokens": 4, "stop_ids": (3,)}])
def test_ranks_gather_logits_of_one_type_where_a_rule_is_of_one_rank_alone(rules: dict[str, object]) -> None:
    logits = torch.randn(1, VOCAB, dtype=torch.bfloat16)
    rows: list[Row] = [([5, 6], 2, RowSampling(temperature=1.0, seed=1, top_p=0.9, **rules))]  # type: ignore[arg-type]
    chosen = run_simulated_ranks(3, lambda comm: sample_on(comm, logits, rows)[0])
    assert chosen == [sample(logits, rows)] * 3


def test_a_row_does_not_depend_on_its_neighbours(mixed: tuple[torch.Tensor, list[Row]]) -> None:
    logits, rows = mixed
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))] == together


def test_a_poisoned_row_does_not_reach_its_neighbours(mixed: tuple[torch.Tensor, list[Row]]) -> None:
    logits, rows = mixed
    together = sample(logits, rows)
    logits = logits.clone()
    logits[3] = math.nan
    poisoned = sample(logits, rows)
    assert poisoned[:3] + poisoned[4:] == together[:3] + together[4:]
    assert 0 <= poisoned[3] < VOCAB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-10, 1e-4])
def test_tiny_temperatures_are_argmax(dtype: torch.dtype, temperature: float) -> None:
    """Field report B33."""
    logits = (torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)
    for rules in ({}, {"top_p": 0.9}, {"top_p": 1e-8}, {"top_k": 3}, {"min_p": 0.5}):
        row = RowSampling(temperature=temperature, seed=9, **rules)  # type: ignore[arg-type]
        assert sample(logits, [([1, 2], 2, row)]) == [int(logits[0].float().argmax())]


def test_a_tiny_top_p_keeps_the_best_token_at_any_temperature() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    for seed in range(50):
        row = RowSampling(temperature=100.0, seed=seed, top_p=1e-8)
        assert sample(logits, [([1], 1, row)]) == [int(logits[0].argmax())]


def test_equal_seeds_agree_and_positions_differ() -> None:
    logits = torch.zeros(1, VOCAB)
    row = RowSampling(temperature=1.0, seed=-5)
    first = [sample(logits, [([0] * length, 1, row)])[0] for length in range(1, 40)]
    again = [sample(logits, [([7] * length, 1, row)])[0] for length in range(1, 40)]
    assert first == again, "the noise depends on seed and position alone"
    assert len(set(first)) > 20


def test_padding_is_never_chosen() -> None:
    logits = torch.zeros(1, VOCAB)

    def body(comm: Communicator) -> list[int]:
        rows: list[Row] = [([1], 1, RowSampling(temperature=5.0, seed=seed, top_p=0.99)) for seed in range(200)]
        return sample_on(comm, logits.expand(200, -1).contiguous(), rows)[0]

    assert all(token < VOCAB for token in run_simulated_ranks(4, body)[0])


def test_min_tokens_holds_stop_ids_back_only_while_the_answer_is_short() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 9.0
    rules = greedy(min_tokens=2, stop_ids=(3,))
    assert sample(logits, [([1, 2, 5], 2, rules)]) != [3]
    assert sample(logits, [([1, 2, 5, 6], 2, rules)]) == [3]


PROMPT = [7, 7, 7, 8]


def test_repetition_penalty_equals_transformers_step_by_step() -> None:
    """Field report B39: prompt and output both count, and a token counts once however often it stands there."""
    processor = RepetitionPenaltyLogitsProcessor(penalty=1.5)
    generator = torch.Generator().manual_seed(5)
    ours, theirs = list(PROMPT), list(PROMPT)
    for _ in range(20):
        logits = torch.randn(1, VOCAB, generator=generator)
        logits[0, ours] += 2.0
        ours.append(sample(logits, [(ours, len(PROMPT), greedy(repetition_penalty=1.5))])[0])
        theirs.append(int(processor(torch.tensor([theirs]), logits.clone()).argmax()))
    assert ours == theirs


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    """Field report B39."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 9], logits[0, 11] = 3.0, 2.5, 2.2
    history = [*PROMPT, 9, 9]
    assert sample(logits, [(history, 4, greedy())]) == [7]
    assert sample(logits, [(history, 4, greedy(presence_penalty=1.0))]) == [7]
    assert sample(logits, [([*PROMPT, 7], 4, greedy(presence_penalty=1.0))]) == [9]
    # 9 stands twice in the output: frequency takes 1.0 from it, presence 0.5.
    logits[0, 7] = 0.0
    assert sample(logits, [(history, 4, greedy(presence_penalty=0.5))]) == [11]
    assert sample(logits, [(history, 4, greedy(frequency_penalty=0.1))]) == [9]
    assert sample(logits, [(history, 4, greedy(frequency_penalty=0.5))]) == [11]


@pytest.mark.parametrize(
    ("rules", "warpers"),
    [
        ({"top_k": 7}, lambda: [TopKLogitsWarper(7)]),
        ({"top_p": 0.7}, lambda: [TopPLogitsWarper(0.7)]),
        ({"min_p": 0.05}, lambda: [MinPLogitsWarper(0.05)]),
        ({"top_k": 30, "top_p": 0.6}, lambda: [TopKLogitsWarper(30), TopPLogitsWarper(0.6)]),
    ],
)
def test_filters_keep_what_transformers_keeps(rules: dict[str, float], warpers: Callable[[], list[object]]) -> None:
    """What transformers keeps, and nothing else, is drawn; the temperature makes all of it about as likely."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(8)) * 150
    chain = LogitsProcessorList([TemperatureLogitsWarper(100.0), *warpers()])
    kept = set(torch.isfinite(chain(torch.tensor([[1]]), logits.clone())[0]).nonzero().flatten().tolist())
    rows: list[Row] = [([1], 1, RowSampling(temperature=100.0, seed=seed, **rules)) for seed in range(4000)]  # type: ignore[arg-type]
    drawn = set(sample(logits.expand(4000, -1).contiguous(), rows))
    assert drawn <= kept
    assert len(drawn) >= len(kept) * 0.9


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    reference = torch.log_softmax(logits, -1)
    rows: list[Row] = [
        ([1], 1, greedy()),
        ([1], 1, RowSampling(temperature=3.0, seed=1, top_k=5, logit_bias=((4, 5.0),), logprobs=3)),
    ]

    def body(comm: Communicator) -> tuple[list[int], SampledLogprobs | None]:
        return sample_on(comm, logits, rows)

    for token_ids, logprobs in run_simulated_ranks(3, body):
        assert logprobs is not None
        assert logprobs.rows == [1]
        torch.testing.assert_close(logprobs.chosen, reference[1, token_ids[1]][None])
        top = reference[1].topk(3)
        assert logprobs.top_ids.tolist() == [top.indices.tolist()]
        torch.testing.assert_close(logprobs.top, top.values[None])


def test_a_rank_that_does_not_report_joins_the_collectives_and_makes_no_logprobs(
    mixed: tuple[torch.Tensor, list[Row]],
) -> None:
    logits, rows = mixed
    alone = sample(logits, rows)

    def body(comm: Communicator) -> tuple[list[int], SampledLogprobs | None]:
        return sample_on(comm, logits, rows, report=comm.rank == 0)

    (first, logprobs), *others = run_simulated_ranks(3, body)
    assert first == alone
    assert logprobs is not None
    assert others == [(alone, None)] * 2


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    rows: list[Row] = [([1], 1, greedy(logprobs=20))]
    state = BatchState(1, 64, 16, CPU)
    device_rows = state.apply(plan_of(rows))
    _, logprobs = Sampler(state, SingleRank(), Span(0, 7, 7, 7), 7).sample(torch.arange(7.0)[None], device_rows)
    assert logprobs is not None
    assert logprobs.top_ids.tolist() == [[6, 5, 4, 3, 2, 1, 0]]


class Steps:
    """One rank's batch state and sampler over several steps, in which tokens 3, 2 and 1 are the likeliest, in turn."""

    def __init__(self, num_slots: int) -> None:
        self.state = BatchState(num_slots, 64, 16, CPU)
        self._sampler = Sampler(self.state, SingleRank(), Span.whole(VOCAB), VOCAB)

    def run(self, plan: StepPlan) -> list[int]:
        rows = self.state.apply(plan)
        logits = torch.zeros(rows.shape.num_rows, VOCAB)
        logits[:, 1:4] = torch.tensor([7.0, 8.0, 9.0])
        token_ids, _ = self._sampler.sample(logits, rows)
        self.state.advance(rows.shape, token_ids)
        self.state.count(rows)
        return [int(token_ids[row]) for row in rows.sampled]


def test_rules_that_depend_on_the_history_follow_it_while_the_rows_stay_the_same() -> None:
    steps = Steps(3)
    rows: list[Row] = [
        ([9, 9], 2, greedy(min_tokens=2, stop_ids=(3, 2))),
        ([9, 3], 1, greedy(min_tokens=2, stop_ids=(3,))),
        ([9, 9], 2, greedy(presence_penalty=1.5)),
    ]
    chosen = [steps.run(plan_of(rows)), *(steps.run(StepPlan(step)) for step in range(1, 4))]
    # The first holds back twice, the second once, the third likes no token that it has chosen.
    assert chosen == [[1, 2, 3], [1, 3, 2], [3, 3, 3], [3, 3, 3]]


def test_a_request_admitted_into_the_same_rows_brings_its_own_rules() -> None:
    steps = Steps(2)
    assert steps.run(plan_of([([9], 1, greedy(logit_bias=((5, 50.0),))), ([9], 1, greedy())])) == [5, 3]
    biased = Admission(1, [9, 9], 2, 1, [0], greedy(logit_bias=((6, 50.0),)))
    plain = Admission(0, [9, 9], 2, 1, [1], greedy())
    assert steps.run(StepPlan(1, admissions=[biased, plain])) == [3, 6]


def test_rules_go_with_the_slot_in_whatever_row_it_runs() -> None:
    """Rows are not slots, and the first does not sample."""
    rules = {
        4: greedy(repetition_penalty=8.0),
        2: RowSampling(temperature=100.0, seed=1, top_k=1),
        0: greedy(logit_bias=((5, 50.0),)),
        3: greedy(min_tokens=1, stop_ids=(3,)),
        1: greedy(),
    }
    admissions = [Admission(slot, [3, 3], 2, 0, [slot], rule) for slot, rule in rules.items()]
    rows = StepRows([1, 3, 4, 0, 2], [1, 2, 2, 2, 2], [False, True, True, True, True])
    assert Steps(5).run(StepPlan(0, admissions=admissions, rows=rows)) == [2, 2, 5, 3]


@pytest.mark.gpu
def test_no_rule_makes_a_step_wait_for_the_gpu(mixed: tuple[torch.Tensor, list[Row]]) -> None:
    _, rows = mixed
    device = torch.device("cuda")
    logits = torch.zeros(len(rows), VOCAB, device=device, dtype=torch.bfloat16)
    state = BatchState(len(rows), 64, 16, device)
    sampler = Sampler(state, SingleRank(), Span.whole(VOCAB), VOCAB)
    stream = torch.cuda.Stream(device)

    def step() -> PendingResult:
        device_rows = state.apply(plan_of(rows))
        token_ids, logprobs = sampler.sample(logits, device_rows)
        state.advance(device_rows.shape, token_ids)
        state.count(device_rows)
        return PendingResult(0, token_ids, logprobs, None, device_rows, stream)

    expected = step().result()  # compiles, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.result() == expected


def asked_of(comm: Communicator, rules: Sequence[RowSampling]) -> Asked:
    state = BatchState(len(rules), 64, 16, CPU)
    device_rows = state.apply(plan_of([([5, 6], 2, rule) for rule in rules]))
    return Sampler(state, comm, span_of(comm.rank, comm.size), VOCAB).asked(device_rows)


WARM, NUCLEUS = RowSampling(temperature=1.0, seed=1), RowSampling(temperature=1.0, seed=1, top_p=0.9)


@pytest.mark.parametrize(
    ("rules", "asked"),
    [
        ([greedy(), WARM], Asked.DRAW),
        ([greedy(top_p=0.9, top_k=3, min_p=0.1)], Asked.DRAW),
        ([greedy(min_tokens=5)], Asked.DRAW),
        ([NUCLEUS, greedy()], Asked.FILTERS),
        ([NUCLEUS, greedy(logit_bias=((3, 1.0),))], Asked.RULES),
        ([greedy(min_tokens=5, stop_ids=(3,)), NUCLEUS], Asked.RULES),
        ([greedy(repetition_penalty=1.5)], Asked.RULES),
        ([greedy(logprobs=0)], Asked.RULES),
    ],
)
def test_every_rank_sees_what_is_asked(rules: list[RowSampling], asked: Asked) -> None:
    """Also a rank whose part of the vocabulary a rule does not touch: the ranks must launch the same steps."""
    assert run_simulated_ranks(4, lambda comm: asked_of(comm, rules)) == [asked] * 4
    assert asked_of(SingleRank(), rules) is asked


def test_ranks_do_not_gather_the_logits_of_many_rows_for_few() -> None:
    rules = [NUCLEUS, WARM, WARM]
    assert run_simulated_ranks(2, lambda comm: asked_of(comm, rules)) == [Asked.RULES] * 2
    assert asked_of(SingleRank(), rules) is Asked.FILTERS


@pytest.mark.parametrize("size", [1, 2, 3])
def test_filters_for_all_rows_at_once_choose_what_filters_for_some_do(
    mixed: tuple[torch.Tensor, list[Row]], size: int
) -> None:
    logits, rows = mixed
    logits, rows = logits[:5], rows[:5]

    def choose(comm: Communicator) -> list[int]:
        state = BatchState(7, 64, 16, CPU)
        state.apply(plan_of(rows))
        span = span_of(comm.rank, comm.size)
        # Two rows more than there are, as a CUDA graph has.
        local = torch.full((7, span.padded), 6e4)
        local[:5, : span.length] = logits[:, span.start : span.start + span.length]
        chosen: list[int] = Sampler(state, comm, span, VOCAB).choose_filtered(local)[:5].tolist()
        return chosen

    assert run_simulated_ranks(size, choose) == [sample(logits, rows)] * size
