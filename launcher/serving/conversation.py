"""How a conversation is answered: its prompt, what the answer is held to, and how it is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.coordinator.errors import InputError
from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.answer_text import AnswerText
from paceline.launcher.dialects.answer_parser import AnswerParser
from paceline.launcher.dialects.dialect import Dialect
from paceline.launcher.dialects.grammar import after_reasoning_grammar, either_grammar
from paceline.launcher.dialects.reasoning import CLOSING, OPENING, ReasoningSplitter, forbids_reasoning, opens_reasoning
from paceline.launcher.dialects.tool_parser import ToolParser
from paceline.launcher.serving.answer_reader import AnswerReader
from paceline.launcher.serving.answers import MakeReader
from paceline.launcher.serving.errors import bad_request
from paceline.launcher.serving.prompts import Prompt
from paceline.launcher.serving.tool_use import ToolUse
from paceline.launcher.tokenizer import Tokenizer

_SWITCH = "enable_thinking"
"""The template variable that turns reasoning off, in Qwen3 and those that follow it."""
_EFFORT = "reasoning_effort"


def template_options(
    given: Mapping[str, Any] | None, effort: str | None, dialect: Dialect, *, param: str = _EFFORT
) -> dict[str, Any]:
    """The chat template's variables. Raises ApiError (400) where it cannot be told of a reasoning effort.

    The effort none turns reasoning off; others are the template's own business, if it reads that variable.
    param: the field of the request that has the effort.
    """
    options = dict(given or {})
    if effort is None:
        return options
    if dialect.has_variable(_EFFORT):
        setting: tuple[str, Any] = (_EFFORT, effort)
    elif effort != "none":
        raise bad_request(f"{param} must be none or left out: the model knows no efforts", param)
    elif not dialect.reasons:
        return options
    elif dialect.has_variable(_SWITCH):
        setting = (_SWITCH, False)
    else:
        raise bad_request(f"{param} must be left out: this model's reasoning cannot be turned off", param)
    name, value = setting
    if options.setdefault(name, value) != value:
        raise bad_request(f"{param} and chat_template_kwargs.{name} differ; give one of them", param)
    return options


def held_to(params: SamplingParams, use: ToolUse | None, prompt: Prompt, dialect: Dialect) -> SamplingParams:
    """The rules with a grammar of all that the request asks for, to be followed once the model has reasoned.

    Raises ApiError (400) where it asks for a call and for text of a format.
    """
    grammar = params.grammar
    calls = None if use is None else use.grammar(dialect.token_ids)
    if use is not None and use.required and grammar is not None:
        raise bad_request("tool_choice asks for a call, so that the answer can have no other format", "tool_choice")
    if grammar is None:
        grammar = calls
    elif use is not None:
        grammar = either_grammar(dataclasses.replace(use, required=True).grammar(dialect.token_ids) or "", grammar)
    if grammar is None:
        return params
    if dialect.reasons and not forbids_reasoning(prompt.ending):
        grammar = after_reasoning_grammar(dialect.token_ids, grammar, opened=opens_reasoning(prompt.ending))
    try:
        return dataclasses.replace(params, grammar=grammar)
    except InputError as error:  # too long, with the schemas of all tools
        message = f"the schemas of tools and the form of the answer are too long together: {error}"
        raise bad_request(message, "tools") from error


def reader_of(tokenizer: Tokenizer, use: ToolUse | None, prompt: Prompt, dialect: Dialect) -> MakeReader:
    """How each answer to this prompt is read."""
    reasons = dialect.reasons and not forbids_reasoning(prompt.ending)
    tags: Sequence[str] = (OPENING, CLOSING) if reasons else ()
    if use is not None:
        tags = (*tags, use.tool_format.opening, use.tool_format.closing)
    shown_ids = frozenset(dialect.token_ids[tag] for tag in tags if tag in dialect.token_ids)

    def make(params: SamplingParams) -> AnswerReader:
        text = AnswerText(tokenizer, params, shown_ids=shown_ids)
        if not tags:
            return AnswerReader(text)
        reasoning = ReasoningSplitter(opened=opens_reasoning(prompt.ending)) if reasons else None
        tools = None
        if use is not None:
            tools = ToolParser(use.tool_format, use.names, several=use.several)
        return AnswerReader(text, AnswerParser(reasoning, tools))

    return make
