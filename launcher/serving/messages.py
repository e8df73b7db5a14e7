"""What the HTTP process and the engine say to each other, and its bytes.

A message is one msgpack array: its name, then its fields. Both ends are started by one command, so there is no version.
A prompt's token ids are raw native int32 inside msgpack's binary type. msgpack: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgpack

from paceline.coordinator.block_manager import BlockUsage
from paceline.coordinator.distribution import Distribution
from paceline.coordinator.errors import EngineError, InputError
from paceline.coordinator.events import CoordinatorStats, RankState, RequestEvent, RequestTimings
from paceline.coordinator.messages import TokenLogprobs
from paceline.coordinator.sampling_params import SamplingParams
from paceline.coordinator.view import EngineView, RequestLine, StepLine
from paceline.launcher.serving.engine_api import EngineInfo


@dataclass(frozen=True, slots=True)
class Submit:
    """To the engine: run a request for one answer."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine: end a request; an unknown one is passed over."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AskStats:
    """To the engine: answer with Stats of the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class AskView:
    """To the engine: answer with View of the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class FrontReady:
    """To the engine: HTTP requests are being taken."""


@dataclass(frozen=True, slots=True)
class FrontFailed:
    """To the engine: the HTTP process could not start, and ends."""

    error: str


@dataclass(frozen=True, slots=True)
class FrontCut:
    """To the engine: as the server is to end, so many answers were cut off; none where all have finished."""

    answers: int


@dataclass(frozen=True, slots=True)
class EngineReady:
    """To the HTTP process: the engine takes requests."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class News:
    """To the HTTP process: what a step gave, of all its requests; events of one request in their order."""

    events: Sequence[RequestEvent]


@dataclass(frozen=True, slots=True)
class Refused:
    """To the HTTP process: a request that can never run as given."""

    request_id: str
    error: str


@dataclass(frozen=True, slots=True)
class Stats:
    """To the HTTP process: the answer to AskStats."""

    number: int
    stats: CoordinatorStats


@dataclass(frozen=True, slots=True)
class View:
    """To the HTTP process: the answer to AskView."""

    number: int
    view: EngineView


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """To the HTTP process: the engine ends, and all its requests with it."""

    error: str


@dataclass(frozen=True, slots=True)
class Drain:
    """To the HTTP process: take no more requests, finish those that run for at most so many seconds, and end.

    A second one has it end at once.
    """

    seconds: float


Message = (
    Submit
    | Abort
    | AskStats
    | AskView
    | FrontReady
    | FrontFailed
    | FrontCut
    | EngineReady
    | News
    | Refused
    | Stats
    | View
    | EngineFailed
    | Drain
)

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}
_STATS_NAMES = tuple(field.name for field in dataclasses.fields(CoordinatorStats))
_RANK_NAMES = tuple(field.name for field in dataclasses.fields(RankState))
_PLAIN_FIELDS = 4
"""Of an event that is tokens and nothing else."""
_PARAM_DEFAULTS = {field.name: getattr(SamplingParams(), field.name) for field in dataclasses.fields(SamplingParams)}


def encode(message: Message) -> bytes:
    """The message as bytes. Raises InputError where a number or a text of a request does not fit its field."""
    match message:
        case Submit():
            fields: Sequence[object] = (
                message.request_id,
                _pack(message.prompt_token_ids),
                _param_fields(message.params),
                message.priority,
                message.cache_salt,
            )
        case News():
            fields = ([_event_fields(event) for event in message.events],)
        case EngineReady():
            fields = (dataclasses.astuple(message.info),)
        case Stats():
            fields = (message.number, _stats_fields(message.stats))
        case View():
            view = message.view
            stats = _stats_fields(view.stats)
            # Requests and steps are tuples already.
            fields = (message.number, view.taken, stats, view.block_holders.tobytes(), view.requests, view.steps)
        case _:
            fields = dataclasses.astuple(message)
    # What the engine says of a failure may hold anything; a request's texts must be as they were given.
    unicode_errors = "strict" if isinstance(message, Submit) else "backslashreplace"
    return _packed((type(message).__name__, *fields), unicode_errors=unicode_errors)


def decode(buffer: bytes) -> Message:
    """The message that encode() made these bytes of. Raises EngineError for bytes of no message."""
    try:
        # Tuples, since garbage collection need not look into those that hold numbers.
        name, *fields = msgpack.unpackb(buffer, strict_map_key=False, use_list=False)
        kind = _KINDS[name]
        if kind is Submit:
            request_id, token_ids, params, priority, cache_salt = fields
            return Submit(request_id, array("i", token_ids), SamplingParams(**params), priority, cache_salt)
        if kind is News:
            return News([_event(item) for item in fields[0]])
        if kind is EngineReady:
            info = EngineInfo(*fields[0])
            return EngineReady(dataclasses.replace(info, end_ids=tuple(info.end_ids), devices=tuple(info.devices)))
        if kind is Stats:
            return Stats(fields[0], _stats(fields[1]))
        if kind is View:
            return View(fields[0], _view(*fields[1:]))
        message: Message = kind(*fields)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise EngineError(f"a message between the HTTP process and the engine cannot be read: {error}") from error
    return message


def _view(
    taken: float, stats: Sequence[Any], holders: bytes, requests: Sequence[Any], steps: Sequence[Any]
) -> EngineView:
    return EngineView(
        taken,
        _stats(stats),
        array("i", holders),
        [RequestLine(*each) for each in requests],
        [StepLine(*each) for each in steps],
    )


def _packed(fields: Sequence[object], *, unicode_errors: str) -> bytes:
    try:
        encoded: bytes = msgpack.packb(fields, unicode_errors=unicode_errors)
    except OverflowError as error:
        raise InputError(f"a number of the request is too large: {error}") from error
    except UnicodeEncodeError as error:
        raise InputError(f"a text of the request is no valid Unicode: {error}") from error
    return encoded


def _pack(token_ids: Sequence[int]) -> bytes:
    try:
        return array("i", token_ids).tobytes()
    except (TypeError, OverflowError) as error:
        raise InputError(f"the prompt must be token ids, whole numbers of the vocabulary: {error}") from error


def _param_fields(params: SamplingParams) -> dict[str, object]:
    """The fields that are not as they are by default."""
    return {name: value for name, default in _PARAM_DEFAULTS.items() if (value := getattr(params, name)) != default}


def _logprob_fields(logprobs: TokenLogprobs) -> tuple[float, list[int], list[float], int]:
    return logprobs.chosen, list(logprobs.top_ids), list(logprobs.top), logprobs.rank


def _event_fields(event: RequestEvent) -> tuple[object, ...]:
    """Nearly all events are tokens and nothing else: of those, what else there may be is left out."""
    plain = event.request_id, event.token_ids, event.num_prompt_tokens, event.cached_tokens
    if event.finish_reason is None and not event.logprobs and not event.prompt_logprobs:
        return plain
    timings = event.timings
    return (
        *plain,
        [_logprob_fields(each) for each in event.logprobs] if event.logprobs else (),
        event.finish_reason,
        event.stop_token,
        timings and (timings.arrived, timings.first_scheduled, timings.first_token, timings.finished),
        [_logprob_fields(each) for each in event.prompt_logprobs] if event.prompt_logprobs else (),
        event.error,
    )


def _event(fields: Sequence[Any]) -> RequestEvent:
    if len(fields) == _PLAIN_FIELDS:
        request_id, token_ids, num_prompt_tokens, cached_tokens = fields
        return RequestEvent(request_id, token_ids, (), num_prompt_tokens, cached_tokens)
    request_id, token_ids, num_prompt_tokens, cached_tokens, *rest = fields
    logprobs, finish_reason, stop_token, timings, prompt_logprobs, error = rest
    return RequestEvent(
        request_id,
        token_ids,
        [TokenLogprobs(*each) for each in logprobs] if logprobs else (),
        num_prompt_tokens,
        cached_tokens,
        finish_reason,
        stop_token,
        None if timings is None else RequestTimings(*timings),
        [TokenLogprobs(*each) for each in prompt_logprobs],
        error,
    )


def _stats_fields(stats: CoordinatorStats) -> tuple[object, ...]:
    nested = {
        "blocks": dataclasses.astuple(stats.blocks),
        "step_seconds": {name: _distribution_fields(each) for name, each in stats.step_seconds.items()},
        "step_requests": _distribution_fields(stats.step_requests),
        "step_tokens": _distribution_fields(stats.step_tokens),
        "ranks": [tuple(getattr(rank, name) for name in _RANK_NAMES) for rank in stats.ranks],
    }
    return tuple(nested.get(name, getattr(stats, name)) for name in _STATS_NAMES)


def _stats(values: Sequence[Any]) -> CoordinatorStats:
    fields = dict(zip(_STATS_NAMES, values, strict=True))
    fields["blocks"] = BlockUsage(*fields["blocks"])
    fields["step_seconds"] = {name: Distribution(*each) for name, each in fields["step_seconds"].items()}
    fields["step_requests"] = Distribution(*fields["step_requests"])
    fields["step_tokens"] = Distribution(*fields["step_tokens"])
    fields["ranks"] = [RankState(*rank) for rank in fields["ranks"]]
    return CoordinatorStats(**fields)


def _distribution_fields(distribution: Distribution) -> tuple[object, ...]:
    return distribution.bounds, distribution.counts, distribution.sum
