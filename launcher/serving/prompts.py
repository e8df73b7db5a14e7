"""From a request's messages or prompt to token ids that the model can take."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paceline.coordinator.checks import is_int
from paceline.coordinator.errors import InputError
from paceline.coordinator.request import check_prompt
from paceline.launcher.serving.engine_api import EngineInfo
from paceline.launcher.serving.errors import bad_request
from paceline.launcher.serving.schemas import Message
from paceline.launcher.serving.tool_schemas import FunctionDefinition
from paceline.launcher.serving.turns import Turn, template_tool, turns_of
from paceline.launcher.tokenizer import Tokenizer

LONG_TEXT = 4096
"""Characters from which tokenising (about a millisecond here) leaves the event loop for a thread."""
ENDING_LENGTH = 64
"""Characters of a rendered conversation that are kept, longer than anything that templates write there."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to run."""

    token_ids: Sequence[int]
    text: str | None = None
    """Where it was given as text."""
    ending: str = ""
    """The last characters of a rendered conversation, where templates begin the answer."""


class PromptReader:
    """Tokenises requests, long ones beside the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._reserved = frozenset({"messages", "self"})
        if tokenizer.backend is not None:
            self._reserved |= inspect.signature(tokenizer.backend.apply_chat_template).parameters.keys()

    async def chat(
        self, messages: Sequence[Message], options: Mapping[str, Any] | None, tools: Sequence[FunctionDefinition] = ()
    ) -> Prompt:
        """The prompt of a conversation that is told of these tools.

        Raises ApiError (400) where it cannot be rendered.
        """
        options = options or {}
        for name in options:
            if name in self._reserved:
                raise bad_request(f"chat_template_kwargs may not hold {name!r}", "chat_template_kwargs")
        if not self._tokenizer.has_chat_template:
            raise bad_request("the model has no chat template; use /v1/completions", "messages", "no_chat_template")
        self._check_options(options)
        turns = turns_of(messages)
        self._check_calls(turns)
        told = [template_tool(function) for function in tools] or None

        def encode() -> Prompt:
            text = self._tokenizer.render_chat(turns, tools=told, **options)
            self._check_names(turns, text, tools=told, **options)
            return Prompt(self._tokenizer.encode_rendered(text), ending=text[-ENDING_LENGTH:])

        size = sum(len(turn["content"]) for turn in turns) + (LONG_TEXT if told else 0)
        return await self._run(size, "messages", encode)

    def _check_calls(self, turns: Sequence[Turn]) -> None:
        """Most templates write roles that they do not know as any other; calls they would leave out."""
        place = next((place for place, turn in enumerate(turns) if "tool_calls" in turn), None)
        if place is not None and "tool_calls" not in self._tokenizer.chat_template(with_tools=True):
            field = f"messages[{place}].tool_calls"
            raise bad_request(f"{field} cannot be shown: the model's chat template does not know tools", field)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ApiError (400) for a variable that the template does not read: it would have no effect."""
        known = self._tokenizer.template_variables() if options else None
        for name in options:
            if known is not None and name not in known:
                raise bad_request(
                    f"chat_template_kwargs holds {name!r}, which the model's chat template does not read",
                    "chat_template_kwargs",
                )

    def _check_names(self, turns: Sequence[Mapping[str, Any]], text: str, **options: Any) -> None:
        """Raise ApiError (400) where messages have names and the text is the same without them."""
        place = next((place for place, turn in enumerate(turns) if "name" in turn), None)
        if place is not None:
            nameless = [{key: value for key, value in turn.items() if key != "name"} for turn in turns]
            if self._tokenizer.render_chat(nameless, **options) == text:
                field = f"messages[{place}].name"
                raise bad_request(f"{field} has no effect: the model's chat template does not show names", field)

    async def text(self, text: str, param: str, *, special_tokens: bool = True) -> Prompt:
        """The prompt of a plain text, by default with what the tokenizer itself puts before it (one BOS at most)."""

        def encode() -> Prompt:
            token_ids = self._tokenizer.encode(text)
            if not special_tokens:
                token_ids = self._tokenizer.backend.encode(text, add_special_tokens=False)
            return Prompt(token_ids, text)

        return await self._run(len(text), param, encode)

    async def _run(self, size: int, param: str, encode: Callable[[], Prompt]) -> Prompt:
        try:
            if size < LONG_TEXT:
                return encode()
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        except InputError as error:
            raise bad_request(str(error), param) from error


def split_prompts(value: object) -> list[str | list[int]]:
    """The prompts of a plain completion: a text, token ids, or a list of either. Raises ApiError (400)."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise bad_request("prompt must be a text, token ids, or a non-empty list of either", "prompt")
    if not isinstance(value[0], (str, list)):
        return [value]
    for place, each in enumerate(value):
        if type(each) is not type(value[0]):
            raise bad_request(f"prompt[{place}] must be {_kind(value[0])}, as prompt[0] is", f"prompt[{place}]")
    return value


def check_token_ids(token_ids: Sequence[object], info: EngineInfo, param: str) -> None:
    """Raise ApiError (400) where something is no token id of the model."""
    for place, token in enumerate(token_ids):
        if not is_int(token) or not 0 <= token < info.vocab_size:  # type: ignore[operator]
            raise bad_request(
                f"{param}[{place}] must be a token id, a whole number from 0 to {info.vocab_size - 1}",
                f"{param}[{place}]",
            )


def check_length(
    prompt: Prompt, max_tokens: int | None, info: EngineInfo, *, param: str, max_tokens_param: str = "max_tokens"
) -> None:
    """Raise ApiError (400) where prompt and answer together exceed the model's length or the cache's size.

    max_tokens: as the client gave it; None takes what the prompt leaves.
    """
    cache = info.num_blocks * info.block_size
    longest, setting = min((info.max_model_len, "the model's length"), (cache, "the cache's size"))
    code = "context_length_exceeded"
    try:
        check_prompt(prompt.token_ids, info.vocab_size, longest, setting)
    except InputError as error:
        raise bad_request(str(error), param, code if prompt.token_ids else None) from error
    left = longest - len(prompt.token_ids)
    if max_tokens is not None and max_tokens > left:
        raise bad_request(
            f"{max_tokens_param} is {max_tokens} and the prompt has {len(prompt.token_ids)} tokens, "
            f"but {setting} allows at most {longest} in prompt and answer together",
            max_tokens_param,
            code,
        )


def _kind(value: object) -> str:
    return "a text" if isinstance(value, str) else "a list of token ids"
