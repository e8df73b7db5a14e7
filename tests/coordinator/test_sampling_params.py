"""Sampling parameters and settings: what is taken, and that all else is refused by name before it can do harm."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.errors import InputError
from paceline.coordinator.messages import Admission, StepPlan
from paceline.coordinator.request import resolve_sampling, resolve_stop_ids
from paceline.coordinator.sampling_params import SamplingParams
from paceline.coordinator.wire import decode, encode

NO_INTEGERS = [None, 1.0, "8", True, [1]]
NO_NUMBERS = [None, "a", True, [1.0], math.nan, math.inf, 10**400]
NO_SWITCHES = [None, 1, "x"]
NONE_ALLOWED = {"seed", "max_tokens", "logprobs", "max_model_len", "num_blocks", "cache_memory_share"}
"""Fields in which None is no fault."""

SAMPLING_FAULTS = [
    ("n top_k min_tokens seed max_tokens logprobs", [*NO_INTEGERS, 2**70, -(2**70)]),
    ("temperature top_p min_p repetition_penalty", [*NO_NUMBERS, -1, 101]),
    ("repetition_penalty", [0]),
    ("presence_penalty frequency_penalty", [*NO_NUMBERS, -2.1, 3]),
    ("include_stop_str_in_output ignore_eos skip_special_tokens", NO_SWITCHES),
    ("stop", [5, b"end", [5], ["end", 5], [None], "", [""], {"end": 1}, ["end"] * 65]),
    ("stop_token_ids", [5, "12", b"12", {5: 1}, [1.0], ["5"], [True], [None], [-1], [2**31]]),
    ("logit_bias", [5, "5", [5], [(5, 1.0)], {"5": 1}, {1.0: 0}, {-1: 0}, {2**31: 0}]),
    ("logit_bias", [{5: "1"}, {5: None}, {5: True}, {5: math.nan}, {5: 101}, {5: 10**400}]),
]
CONFIG_FAULTS = [
    ("model", [None, 5, b"folder"]),
    ("device dtype load_format policy", [None, 5, "fastest", ["auto"]]),
    ("tensor_parallel_size block_size max_num_seqs max_batched_tokens", [*NO_INTEGERS, 0]),
    ("block_size", [12]),
    ("max_model_len num_blocks", [*NO_INTEGERS, 0, -1]),
    ("cache_memory_share", [*NO_NUMBERS, 0, 1.1]),
    ("prefix_cache check_lockstep", NO_SWITCHES),
]


def each(faults):
    """(field, value) of every fault; None is none where it is allowed."""
    pairs = [(name, value) for names, values in faults for name in names.split() for value in values]
    return [(name, value) for name, value in pairs if value is not None or name not in NONE_ALLOWED]


@pytest.mark.parametrize(("name", "value"), each(SAMPLING_FAULTS), ids=lambda value: ascii(value)[:30])
def test_a_bad_value_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(InputError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), each(CONFIG_FAULTS), ids=lambda value: ascii(value)[:30])
def test_a_bad_setting_is_refused_by_its_name(name, value):
    with pytest.raises(InputError, match=name):
        EngineConfig(**{"model": "", name: value})


def test_a_number_that_python_does_not_write_out_is_refused_by_name_too():
    with pytest.raises(InputError, match=r"min_tokens must be .* too long to show"):
        SamplingParams(min_tokens=10**10_000)


@pytest.mark.parametrize(("name", "empty"), [("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})])
def test_none_is_empty(name, empty):
    assert getattr(SamplingParams(**{name: None}), name) == empty


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("stop", "end", ("end",)),
        ("stop", ["end", "fin"], ("end", "fin")),
        ("stop_token_ids", range(2), (0, 1)),
        ("logit_bias", {5: 1, 2**31 - 1: -100}, {5: 1, 2**31 - 1: -100}),
    ],
)
def test_containers(name, given, kept):
    assert getattr(SamplingParams(**{name: given}), name) == kept


def test_a_callers_later_change_of_its_containers_changes_nothing():
    stop, stop_token_ids, logit_bias = ["end"], [5], {5: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids, logit_bias=logit_bias)
    stop.append("")
    stop_token_ids.append(2**70)
    logit_bias[2**70] = 1.0
    assert params == SamplingParams(stop=["end"], stop_token_ids=[5], logit_bias={5: 1.0})


def test_more_tokens_at_least_than_at_most():
    with pytest.raises(InputError, match=r"min_tokens \(17\) must not exceed max_tokens \(16\)"):
        SamplingParams(min_tokens=17)


EDGES = [sign * 2**power + step for power in (15, 31, 32, 63, 64, 70) for sign in (1, -1) for step in (-1, 0, 1)]
INTEGERS = st.integers(-2, 130) | st.sampled_from(EDGES)
ONE_FIELD = st.one_of(
    *(st.fixed_dictionaries({name: INTEGERS}) for name in ("top_k", "seed", "max_tokens", "logprobs")),
    st.fixed_dictionaries({"min_tokens": INTEGERS, "max_tokens": st.none() | INTEGERS}),
    st.fixed_dictionaries({"stop_token_ids": st.lists(INTEGERS, max_size=2)}),
    st.fixed_dictionaries({"logit_bias": st.dictionaries(INTEGERS, st.floats() | INTEGERS, max_size=2)}),
)
"""Mostly one field at a time: of many at once nearly always one is refused."""


@given(ONE_FIELD)
@example({"min_tokens": 2**70, "max_tokens": None})
@example({"min_tokens": 2**63, "max_tokens": None})
def test_whatever_is_accepted_travels(values):
    # Field report B34: one request of a number too large must not end the engine for all.
    try:
        params = SamplingParams(**values)
    except InputError:
        return
    stop_ids = resolve_stop_ids(params, (), 2**31)
    sampling = resolve_sampling(params, stop_ids)
    plan = StepPlan(0, admissions=[Admission(0, [1], 1, 0, [0], sampling)])
    received = decode(encode(plan))
    assert isinstance(received, StepPlan)
    assert received.admissions[0].sampling == sampling
