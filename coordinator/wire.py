"""The bytes of a step message.

A message is one msgpack array whose first element is the version of this layout:

    [version, error text]                                           Shutdown
    [version, step]                                                 a plan that changes nothing and runs the same rows
    [version, step, freed, admissions, block appends, rows, masks]  any other plan

Token ids, block ids, slots and counts are raw little-endian int32 arrays inside msgpack's binary type: they cost one
copy on each side however long the prompt is; so are the masks. Every machine that runs the engine is little-endian.

msgpack: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Sequence

import msgpack

from paceline.coordinator.errors import EngineError
from paceline.coordinator.messages import Admission, RowSampling, Shutdown, StepPlan, StepRows

VERSION = 2

_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def encode(message: StepPlan | Shutdown) -> bytes:
    """The message as bytes. Raises EngineError where a number does not fit its field (32 bits; 64 for seeds)."""
    try:
        encoded: bytes = msgpack.packb(_fields_of(message), unicode_errors="backslashreplace")
    except OverflowError as error:
        raise EngineError(f"step message holds a number too large for its field: {error}") from error
    return encoded


def decode(buffer: bytes | bytearray | memoryview) -> StepPlan | Shutdown:
    """The message that encode() made these bytes of; integer sequences come back as int32 arrays of their own memory.

    Raises EngineError on anything else: other versions, truncated or altered bytes, fields of the wrong kind.
    """
    try:
        fields = msgpack.unpackb(buffer)
    except ValueError as error:  # every error of msgpack's is one
        raise EngineError(f"step message is not valid msgpack: {error}") from error
    if not isinstance(fields, list) or not fields or fields[0] != VERSION:
        raise EngineError(f"step message is not of version {VERSION}: run the same paceline on every rank")
    match fields[1:]:
        case [str(error_text)]:
            return Shutdown(error_text)
        case [step]:
            return StepPlan(_integer(step, "step"))
        case [step, freed, admissions, block_appends, rows, masks]:
            return StepPlan(
                step=_integer(step, "step"),
                freed=_int32s(freed, "freed"),
                admissions=[_admission(each) for each in _list(admissions, "admissions")],
                block_appends=[_block_append(each) for each in _list(block_appends, "block_appends")],
                rows=None if rows is None else _rows(rows),
                masks=[_mask(each) for each in _list(masks, "masks")],
            )
    raise EngineError(f"step message has {len(fields)} fields, which no message of version {VERSION} has")


def _fields_of(message: StepPlan | Shutdown) -> list[object]:
    if isinstance(message, Shutdown):
        return [VERSION, message.error]
    says_something = message.freed or message.admissions or message.block_appends or message.masks
    if not says_something and message.rows is None:
        return [VERSION, message.step]
    return [
        VERSION,
        message.step,
        _pack(message.freed),
        [_admission_fields(each) for each in message.admissions],
        [(slot, _pack(block_ids)) for slot, block_ids in message.block_appends],
        None if message.rows is None else _rows_fields(message.rows),
        message.masks,
    ]


def _admission_fields(admission: Admission) -> tuple[object, ...]:
    sampling = admission.sampling
    return (
        admission.slot,
        _pack(admission.token_ids),
        admission.prompt_len,
        admission.num_computed,
        _pack(admission.block_ids),
        (
            sampling.temperature,
            sampling.seed,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            _pack([token for token, _ in sampling.logit_bias]),
            [bias for _, bias in sampling.logit_bias],
            sampling.min_tokens,
            _pack(sampling.stop_ids),
            sampling.logprobs,
            sampling.prompt_logprobs,
        ),
    )


def _rows_fields(rows: StepRows) -> tuple[bytes, bytes, bytes]:
    return _pack(rows.slots), _pack(rows.counts), bytes(map(bool, rows.samples))


def _pack(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def _admission(value: object) -> Admission:
    slot, token_ids, prompt_len, num_computed, block_ids, sampling = _list(value, "admission", 6)
    return Admission(
        slot=_integer(slot, "slot", 0, _INT32_MAX),
        token_ids=_int32s(token_ids, "token_ids"),
        prompt_len=_integer(prompt_len, "prompt_len", 0, _INT32_MAX),
        num_computed=_integer(num_computed, "num_computed", 0, _INT32_MAX),
        block_ids=_int32s(block_ids, "block_ids"),
        sampling=_sampling(sampling),
    )


def _sampling(value: object) -> RowSampling:
    (
        temperature,
        seed,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        biased_ids,
        biases,
        min_tokens,
        stop_ids,
        logprobs,
        prompt_logprobs,
    ) = _list(value, "sampling", 14)
    bias_tokens = _int32s(biased_ids, "logit_bias")
    bias_values = [_real(bias, "logit_bias") for bias in _list(biases, "logit_bias", len(bias_tokens))]
    return RowSampling(
        temperature=_real(temperature, "temperature"),
        seed=_integer(seed, "seed", _INT64_MIN),
        top_k=_integer(top_k, "top_k", 0, _INT32_MAX),
        top_p=_real(top_p, "top_p"),
        min_p=_real(min_p, "min_p"),
        repetition_penalty=_real(repetition_penalty, "repetition_penalty"),
        presence_penalty=_real(presence_penalty, "presence_penalty"),
        frequency_penalty=_real(frequency_penalty, "frequency_penalty"),
        logit_bias=tuple(zip(bias_tokens, bias_values, strict=True)),
        min_tokens=_integer(min_tokens, "min_tokens"),
        stop_ids=tuple(_int32s(stop_ids, "stop_ids")),
        logprobs=_integer(logprobs, "logprobs", -1, _INT32_MAX),
        prompt_logprobs=_integer(prompt_logprobs, "prompt_logprobs", -1, _INT32_MAX),
    )


def _block_append(value: object) -> tuple[int, Sequence[int]]:
    slot, block_ids = _list(value, "block append", 2)
    return _integer(slot, "slot", 0, _INT32_MAX), _int32s(block_ids, "block_ids")


def _mask(value: object) -> tuple[int, bytes]:
    slot, words = _list(value, "mask", 2)
    if not isinstance(words, bytes) or len(words) % 4:
        raise _wrong("mask", "whole 32-bit words", words)
    return _integer(slot, "slot", 0, _INT32_MAX), words


def _rows(value: object) -> StepRows:
    slots, counts, samples = _list(value, "rows", 3)
    if not isinstance(samples, bytes):
        raise _wrong("samples", "a byte a row", samples)
    rows = StepRows(_int32s(slots, "slots"), _int32s(counts, "counts"), list(map(bool, samples)))
    if not len(rows.slots) == len(rows.counts) == len(rows.samples):
        raise EngineError(
            f"step message has rows of unequal length: {len(rows.slots)} slots, {len(rows.counts)} counts,"
            f" {len(rows.samples)} samples"
        )
    return rows


def _int32s(value: object, name: str) -> array[int]:
    if not isinstance(value, bytes) or len(value) % 4:
        raise _wrong(name, "an array of 32-bit integers", value)
    return array("i", value)


def _list(value: object, name: str, length: int | None = None) -> list[object]:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise _wrong(name, "a list" if length is None else f"a list of {length} fields", value)
    return value


def _integer(value: object, name: str, low: int = 0, high: int = _INT64_MAX) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _wrong(name, f"a whole number from {low} to {high}", value)
    return value


def _real(value: object, name: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong(name, "a number", value)
    return value


def _wrong(name: str, wanted: str, value: object) -> EngineError:
    return EngineError(f"step message has {reprlib.repr(value)} as {name}, not {wanted}")
