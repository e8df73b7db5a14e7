"""From a request's fields to SamplingParams, with errors that name the field as the client spelled it.

What a request leaves open has the server's defaults (ServerSettings.sampling_defaults), or those of SamplingParams.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.coordinator.checks import MAX_INT32, check_integer, shown
from paceline.coordinator.errors import InputError
from paceline.coordinator.sampling_params import MAX_GRAMMAR_BYTES, MAX_LOGPROBS, SamplingParams
from paceline.launcher.serving.engine_api import EngineInfo
from paceline.launcher.serving.errors import bad_request, field_at_fault
from paceline.launcher.serving.responses_schemas import ResponsesBody
from paceline.launcher.serving.schemas import AnswerBody, ChatBody, CompletionBody, SamplingBody
from paceline.launcher.serving.structured import requested_grammar

_SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
)
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def chat_sampling(body: ChatBody, info: EngineInfo, has_tokenizer: bool, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling rules of a chat request, with defaults. Raises ApiError (400) naming the field at fault."""
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        _check("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    max_tokens = getattr(body, body.max_tokens_param)
    if max_tokens is not None:
        _check(body.max_tokens_param, max_tokens, 1, MAX_INT32)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _answer_sampling(body, info, has_tokenizer, defaults, max_tokens, logprobs)


def completion_sampling(
    body: CompletionBody, info: EngineInfo, has_tokenizer: bool, defaults: Mapping[str, Any]
) -> SamplingParams:
    """Sampling rules of a plain completion, with defaults. Raises ApiError (400) naming the field at fault."""
    # An echoed prompt is a part of the answer, and has log-probabilities where that has. Where it is the whole of it
    # the engine is asked for them in any case, since it runs no request that asks for nothing.
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        message = "max_tokens must be at least 1, unless echo is true or prompt_logprobs are asked for"
        raise bad_request(message, "max_tokens")
    echoed = body.logprobs if body.echo else None
    if body.echo and body.max_tokens == 0:
        echoed = body.logprobs or 0
    return _answer_sampling(body, info, has_tokenizer, defaults, body.max_tokens, body.logprobs, echoed)


def responses_sampling(
    body: ResponsesBody, info: EngineInfo, has_tokenizer: bool, defaults: Mapping[str, Any]
) -> SamplingParams:
    """Sampling rules of a request to /v1/responses, with defaults. Raises ApiError (400) naming the field at fault."""
    if body.max_output_tokens is not None:
        _check("max_output_tokens", body.max_output_tokens, 1, MAX_INT32)
    return _sampling(body, info, has_tokenizer, defaults, max_tokens=body.max_output_tokens)


def _answer_sampling(
    body: AnswerBody,
    info: EngineInfo,
    has_tokenizer: bool,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    echoed_logprobs: int | None = None,
) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    if body.prompt_logprobs is not None:
        if body.stream:
            raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")
        _check("prompt_logprobs", body.prompt_logprobs, 0, MAX_LOGPROBS)
    wishes = [wish for wish in (body.prompt_logprobs, echoed_logprobs) if wish is not None]
    return _sampling(
        body,
        info,
        has_tokenizer,
        defaults,
        n=1 if body.n is None else body.n,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=max(wishes, default=None),
    )


def _sampling(
    body: SamplingBody, info: EngineInfo, has_tokenizer: bool, defaults: Mapping[str, Any], **values: Any
) -> SamplingParams:
    """values: the rules that the endpoints' bodies do not have in common."""
    values |= defaults
    values |= {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    form = requested_grammar(body)
    if form is not None and not has_tokenizer:
        raise bad_request(f"{form[0]} needs a tokenizer, and this model has none", form[0])
    if form is not None and len(form[1].encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise bad_request(f"{form[0]} may have at most {MAX_GRAMMAR_BYTES} bytes as a grammar", form[0])
    grammar = None if form is None else form[1]
    try:
        params = SamplingParams(**values, logit_bias=_logit_bias(body.logit_bias), grammar=grammar)
        params.check_vocabulary(info.vocab_size)
    except InputError as error:
        message = str(error)
        raise bad_request(message, field_at_fault(message, type(body).model_fields)) from error
    if params.stop and not has_tokenizer:
        raise bad_request("stop texts need a tokenizer, and this model has none; use stop_token_ids", "stop")
    return params


def _logit_bias(biases: dict[str, float] | None) -> dict[int, float]:
    """JSON's keys are texts."""
    for key in biases or {}:
        if not _TOKEN_ID.fullmatch(key):
            raise InputError(f"each key of logit_bias must be a token id, got {shown(key)}")
    return {int(key): bias for key, bias in (biases or {}).items()}


def _check(name: str, value: int, low: int, high: int) -> None:
    try:
        check_integer(name, value, low, high)
    except InputError as error:
        raise bad_request(str(error), name) from error
