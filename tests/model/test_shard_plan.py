"""The arithmetic of cutting: everything is held, once where it must be once, in equal shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_configs import LLAMA

from paceline.model.config import ModelConfig
from paceline.model.errors import ModelConfigError
from paceline.model.shard_plan import ShardPlan, Span


def model_config(kv_heads: int, group: int, mlp: int, vocab: int) -> ModelConfig:
    heads = {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads, "head_dim": 16}
    return ModelConfig.from_dict(LLAMA | heads | {"intermediate_size": mlp, "vocab_size": vocab})


plans = st.builds(
    ShardPlan,
    st.builds(model_config, st.integers(1, 16), st.integers(1, 16), st.integers(1, 3000), st.integers(1, 3000)),
    st.integers(1, 8),
)


def held(spans: list[Span]) -> list[int]:
    """All elements that the spans hold, sorted."""
    return sorted(element for span in spans for element in range(span.start, span.start + span.length))


@given(plans)
def test_query_heads_mlp_and_vocabulary_are_held_once_in_rank_order(plan: ShardPlan) -> None:
    for cut in (plan.query_heads, plan.mlp, plan.vocab):
        spans = [cut(rank) for rank in range(plan.tp)]
        in_rank_order = [element for span in spans for element in range(span.start, span.start + span.length)]
        assert in_rank_order == list(range(spans[0].total))
        assert len({span.padded for span in spans}) == 1
        assert all(0 <= span.length <= span.padded for span in spans)


@given(plans)
def test_each_kv_head_is_held_by_the_same_number_of_ranks(plan: ShardPlan) -> None:
    spans = [plan.kv_heads(rank) for rank in range(plan.tp)]
    heads = range(plan.config.num_key_value_heads)
    assert held(spans) == sorted(list(heads) * plan.kv_copies)
    assert len({span.padded for span in spans}) == 1
    assert plan.kv_copies == max(1, plan.tp // len(heads))


@given(plans)
def test_a_query_head_finds_its_kv_head_at_the_place_attention_looks(plan: ShardPlan) -> None:
    """Attention takes local query head i with local KV head i // (local query heads / local KV heads)."""
    group = plan.config.num_attention_heads // plan.config.num_key_value_heads
    for rank in range(plan.tp):
        query, kv = plan.query_heads(rank), plan.kv_heads(rank)
        local_group, rest = divmod(query.padded, kv.padded)
        assert rest == 0
        for local in range(query.length):
            assert kv.start + local // local_group == (query.start + local) // group
            assert local // local_group < kv.length


@given(plans)
def test_no_padding_where_everything_divides(plan: ShardPlan) -> None:
    for total, cut in ((plan.config.intermediate_size, plan.mlp), (plan.config.vocab_size, plan.vocab)):
        size, rest = divmod(total, plan.tp)
        spans = [cut(rank) for rank in range(plan.tp)]
        if rest == 0:
            assert all(span.length == span.padded == size for span in spans)
        else:
            assert all(span.padded % 8 == 0 and span.padded - size <= 8 for span in spans)


@pytest.mark.parametrize(
    ("kv_heads", "group", "tp", "queries", "kvs"),
    [
        (3, 3, 2, [(0, 6, 6), (6, 3, 6)], [(0, 2, 2), (2, 1, 2)]),
        (2, 2, 4, [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1)], [(0, 1, 1), (0, 1, 1), (1, 1, 1), (1, 1, 1)]),
        (
            2,
            7,
            5,
            [(0, 4, 4), (4, 3, 4), (7, 4, 4), (11, 3, 4), (14, 0, 4)],
            [(0, 1, 1)] * 2 + [(1, 1, 1)] * 2 + [(2, 0, 1)],
        ),
    ],
    ids=["padded", "copied", "copied-and-padded"],
)
def test_worked_examples(
    kv_heads: int, group: int, tp: int, queries: list[tuple[int, int, int]], kvs: list[tuple[int, int, int]]
) -> None:
    plan = ShardPlan(model_config(kv_heads, group, 64, 64), tp)

    def shown(span: Span) -> tuple[int, int, int]:
        return span.start, span.length, span.padded

    assert [shown(plan.query_heads(rank)) for rank in range(tp)] == queries
    assert [shown(plan.kv_heads(rank)) for rank in range(tp)] == kvs


def test_a_plan_for_no_rank_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="tensor_parallel_size must be at least 1, got 0"):
        ShardPlan(model_config(2, 2, 8, 8), 0)
