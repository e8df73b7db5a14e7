"""Step messages survive the trip as bytes, and bytes that are none are refused with the engine's own error."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.coordinator.errors import EngineError
from paceline.coordinator.messages import Admission, RowSampling, Shutdown, StepPlan, StepRows
from paceline.coordinator.wire import VERSION, decode, encode

INT32 = st.integers(0, 2**31 - 1)
INT64 = st.integers(0, 2**63 - 1)
IDS = st.lists(INT32, max_size=40)
REAL = st.floats(allow_nan=False)

SAMPLING = st.builds(
    RowSampling,
    temperature=REAL,
    seed=st.integers(-(2**63), 2**63 - 1),
    top_k=INT32,
    top_p=REAL,
    min_p=REAL,
    repetition_penalty=REAL,
    presence_penalty=REAL,
    frequency_penalty=REAL,
    logit_bias=st.lists(st.tuples(INT32, REAL), max_size=4).map(tuple),
    min_tokens=INT64,
    stop_ids=IDS.map(tuple),
    logprobs=st.integers(-1, 20),
    prompt_logprobs=st.integers(-1, 20),
)
ADMISSION = st.builds(
    Admission,
    slot=INT32,
    token_ids=IDS,
    prompt_len=INT32,
    num_computed=INT32,
    block_ids=IDS,
    sampling=SAMPLING,
)
ROWS = st.lists(st.tuples(INT32, INT32, st.booleans()), max_size=20).map(
    lambda rows: StepRows([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
)
PLAN = st.builds(
    StepPlan,
    step=INT64,
    freed=IDS,
    admissions=st.lists(ADMISSION, max_size=3),
    block_appends=st.lists(st.tuples(INT32, IDS), max_size=5),
    rows=st.none() | ROWS,
    masks=st.lists(st.tuples(INT32, st.integers(0, 5).flatmap(lambda n: st.binary(min_size=4 * n, max_size=4 * n)))),
)
MESSAGE = PLAN | st.builds(Shutdown, st.text())
VALUE = st.recursive(
    st.none() | st.booleans() | INT64 | REAL | st.text(max_size=3) | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=20,
)

FULL_PLAN = StepPlan(
    step=7,
    freed=[3],
    admissions=[
        Admission(5, [1, 2, 3], 2, 1, [9], RowSampling(0.5, -3, logit_bias=((4, -1.5),), stop_ids=(2,), logprobs=2))
    ],
    block_appends=[(0, [11, 12])],
    rows=StepRows([0, 5], [1, 2], [True, False]),
    masks=[(0, b"\xff\x01\0\x80")],
)


def plain(value: Any) -> Any:
    """A message as nested lists of plain numbers: which kind of sequence holds them is the decoder's choice."""
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, *(plain(getattr(value, each.name)) for each in dataclasses.fields(value))]
    if isinstance(value, (str, bytes, int, float)) or value is None:
        return value
    return [plain(each) for each in value]


@settings(deadline=None)
@given(MESSAGE)
def test_a_message_comes_back_as_it_was(message: StepPlan | Shutdown) -> None:
    assert plain(decode(encode(message))) == plain(message)


def test_integer_sequences_come_back_writable_in_native_32_bits() -> None:
    plan = decode(encode(FULL_PLAN))
    assert isinstance(plan, StepPlan)
    view = memoryview(plan.admissions[0].token_ids)  # type: ignore[arg-type]
    assert (view.format, view.itemsize, view.readonly) == ("i", 4, False)


@pytest.mark.parametrize("step", [0, 10**6, 2**63 - 1])
def test_a_steady_decode_step_is_at_most_11_bytes(step: int) -> None:
    assert len(encode(StepPlan(step))) <= 11


def test_a_long_prompt_costs_four_bytes_a_token() -> None:
    admission = Admission(0, range(131_072), 131_072, 0, [], RowSampling(0.0, 1))
    assert len(encode(StepPlan(0, admissions=[admission]))) < 4 * 131_072 + 200


def test_an_error_text_with_undecodable_characters_still_arrives() -> None:
    assert decode(encode(Shutdown("no file /tmp/\udcff"))) == Shutdown("no file /tmp/\\udcff")


@pytest.mark.parametrize(
    "plan", [StepPlan(2**64), StepPlan(0, freed=[2**31]), StepPlan(0, block_appends=[(2**64, [])])]
)
def test_a_number_too_large_for_its_field_is_refused(plan: StepPlan) -> None:
    with pytest.raises(EngineError, match="too large"):
        encode(plan)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(EngineError):
        decode(data)


@settings(deadline=None, max_examples=300)
@given(st.lists(VALUE, max_size=6))
def test_well_formed_msgpack_of_any_content_never_raises_anything_else(fields: list[Any]) -> None:
    with contextlib.suppress(EngineError):
        decode(msgpack.packb([VERSION, *fields]))


@settings(deadline=None, max_examples=200)
@given(PLAN, st.data())
def test_altered_bytes_never_raise_anything_else(plan: StepPlan, data: st.DataObject) -> None:
    encoded = bytearray(encode(plan))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(EngineError):
        decode(encoded)


def test_every_truncation_and_any_extra_byte_is_refused() -> None:
    encoded = encode(FULL_PLAN)
    for length in range(len(encoded)):
        with pytest.raises(EngineError):
            decode(encoded[:length])
    with pytest.raises(EngineError):
        decode(encoded + b"\0")


def test_another_version_is_refused() -> None:
    with pytest.raises(EngineError, match="same paceline on every rank"):
        decode(msgpack.packb([VERSION + 1, 0]))


ADMISSION_FIELDS = [5, bytes(12), 2, 1, bytes(4), [0.5, 3, 0, 1.0, 0.0, 1.0, 0.0, 0.0, b"", [], 0, b"", -1, -1]]


def with_field(fields: list[Any], position: int, value: Any) -> list[Any]:
    return [*fields[:position], value, *fields[position + 1 :]]


def with_sampling(position: int, value: Any) -> list[Any]:
    return with_field(ADMISSION_FIELDS, 5, with_field(ADMISSION_FIELDS[5], position, value))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ([], "version"),
        ([VERSION], "1 fields"),
        ([VERSION, 0, b""], "3 fields"),
        ([VERSION, -1], "step"),
        ([VERSION, True], "step"),
        ([VERSION, 1.0], "step"),
        ([VERSION, 0, b"\0\0\0", [], [], None, []], "freed"),
        ([VERSION, 0, "abcd", [], [], None, []], "freed"),
        ([VERSION, 0, b"", {}, [], None, []], "admissions"),
        ([VERSION, 0, b"", [[1, 2]], [], None, []], "admission"),
        ([VERSION, 0, b"", [with_field(ADMISSION_FIELDS, 0, 2**31)], [], None, []], "slot"),
        ([VERSION, 0, b"", [with_field(ADMISSION_FIELDS, 1, [1, 2])], [], None, []], "token_ids"),
        ([VERSION, 0, b"", [with_sampling(0, "hot")], [], None, []], "temperature"),
        ([VERSION, 0, b"", [with_sampling(1, 2**63)], [], None, []], "seed"),
        ([VERSION, 0, b"", [with_sampling(8, bytes(4))], [], None, []], "logit_bias"),
        ([VERSION, 0, b"", [], [[0]], None, []], "block append"),
        ([VERSION, 0, b"", [], [], [b"", b"", "yes"], []], "samples, not a byte a row"),
        ([VERSION, 0, b"", [], [], [bytes(8), bytes(4), b"\1"], []], "unequal"),
        ([VERSION, 0, b"", [], [], None, [[0, bytes(5)]]], "mask"),
        ([VERSION, 0, b"", [], [], None, [[0, [1, 2]]]], "mask"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: list[Any], named: str) -> None:
    with pytest.raises(EngineError, match=named):
        decode(msgpack.packb(fields))
