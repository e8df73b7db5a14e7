"""The answers to one request: every choice of every prompt, run together and ended together."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from paceline.coordinator.errors import EngineError
from paceline.coordinator.events import RequestEvent, RequestTimings
from paceline.coordinator.messages import TokenLogprobs
from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.choices import choice_seed
from paceline.launcher.dialects.parts import Content, Part
from paceline.launcher.serving.answer_reader import AnswerReader
from paceline.launcher.serving.engine_api import EngineApi
from paceline.launcher.serving.errors import ApiError, bad_request
from paceline.launcher.serving.metrics import ServerMetrics
from paceline.launcher.serving.prompts import Prompt


@dataclasses.dataclass(slots=True)
class Piece:
    """What is new of one choice."""

    index: int
    """Of the choice: those of the first prompt come first."""
    text: str
    """Of a plain completion."""
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: str | None = None
    """stop, length or tool_calls, with the choice's last piece."""
    stop_reason: int | str | None = None
    """The caller's own stop text or stop token id that ended the choice."""
    parts: Sequence[Part] = ()
    """Of an answer that may hold reasoning or calls, in place of the text."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Of all tokens of the prompt but the first, with the choice's first piece, where they were asked for."""

    @property
    def only_text(self) -> str | None:
        """The text for the reader, where the piece says nothing else, as nearly all do."""
        if self.finish_reason is not None or self.logprobs:
            return None
        if not self.parts:
            return self.text
        part = self.parts[0]
        return part.text if isinstance(part, Content) and len(self.parts) == 1 else None


Show = Callable[[Piece], Awaitable[None]]
MakeReader = Callable[[SamplingParams], AnswerReader]


class Answers:
    """Runs a request's choices in the engine."""

    def __init__(
        self,
        engine: EngineApi,
        make_reader: MakeReader,
        metrics: ServerMetrics,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        answer_id: str,
        started: float,
        priority: int,
        cache_salt: str,
        grammar_field: str | None,
    ) -> None:
        """grammar_field: of the request, at fault where the answers' grammar cannot be followed."""
        self._engine = engine
        self._make_reader = make_reader
        self._readers: list[AnswerReader] = []
        self._metrics = metrics
        self._prompts = prompts
        self.params = params
        self.answer_id = answer_id
        self._priority = priority
        self._cache_salt = cache_salt
        self._grammar_field = grammar_field
        self._started = started
        self._cached = [0] * len(prompts)
        self.completion_tokens = 0
        self.finish_reasons: list[str] = []
        self.timings: list[RequestTimings] = []
        """Of the choices that have ended."""

    @property
    def count(self) -> int:
        """How many choices there are."""
        return len(self._prompts) * self.params.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self._prompts)

    @property
    def cached_tokens(self) -> int:
        """How many prompt tokens were found in the prefix cache, by each prompt's first choice."""
        return sum(self._cached)

    @property
    def reasoning_tokens(self) -> int:
        """How many of the completion's tokens were reasoning."""
        return sum(reader.reasoning_tokens for reader in self._readers)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, of now."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage

    def log_fields(self, with_prompts: bool) -> dict[str, Any]:
        """What the log line of the request says of its answers."""
        fields: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reasons": self.finish_reasons,
        }
        if with_prompts:
            fields["prompts"] = [list(each.token_ids) if each.text is None else each.text for each in self._prompts]
        return fields

    async def run(self, show: Show) -> None:
        """Run all choices, showing their pieces as they come; where this is cancelled or fails, all are aborted.

        Raises ApiError, InputError or EngineError, whatever the first choice that fails raises.
        """
        try:
            # In tasks, a single choice too: what wakes a task for a token leads through all that the task is in.
            async with asyncio.TaskGroup() as group:
                for index in range(self.count):
                    group.create_task(self._answer(index, show))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, index: int, show: Show) -> None:
        prompt, choice = divmod(index, self.params.n)
        request_id = f"{self.answer_id}-{index}"
        single = self.params
        if single.n > 1:  # a copy is checked anew, field by field
            single = dataclasses.replace(single, n=1, seed=choice_seed(single.seed, choice))
        all_news = self._engine.submit(
            request_id,
            self._prompts[prompt].token_ids,
            single,
            priority=self._priority,
            cache_salt=self._cache_salt,
        )
        watch = self._metrics.watch_answer(self._started, len(self._prompts[prompt].token_ids))
        finished = False
        try:
            reader = self._make_reader(single)
            self._readers.append(reader)
            async for news in all_news:
                if choice == 0:
                    self._cached[prompt] = news.cached_tokens
                finished = news.finish_reason is not None
                piece = self._piece(index, reader, news, request_id)
                if piece is not None:
                    watch.tokens(len(piece.token_ids))
                    self.completion_tokens += len(piece.token_ids)
                    if piece.finish_reason is not None:
                        self.finish_reasons.append(piece.finish_reason)
                        watch.finished(piece.finish_reason, news.timings)
                        if news.timings is not None:
                            self.timings.append(news.timings)
                    await show(piece)
            if not finished:
                raise EngineError("the engine left an answer without an end")
        finally:
            watch.close()
            if not finished:
                self._engine.abort(request_id)
            await _close(all_news)

    def _piece(self, index: int, reader: AnswerReader, news: RequestEvent, request_id: str) -> Piece | None:
        """The news as text; None between an early end and the engine's word that the answer has ended there."""
        reason = news.finish_reason
        if reader.ended:
            # What was computed after the end is no part of the answer.
            return None if reason is None else Piece(index, "", (), (), _ending(reader, "stop"), reader.stop_text)
        text, parts = reader.feed(news.token_ids, last=reason is not None, stop_token=news.stop_token)
        if reader.ended:
            if reason is None:
                self._engine.abort(request_id)
            else:
                reason = "stop"
        elif reason == "error":
            message = f"the answer's grammar cannot be followed: {news.error}"
            raise bad_request(message, self._grammar_field, "grammar_error")
        elif reason is not None and reason not in ("stop", "length"):
            raise ApiError(503, "the server ended this request before it was finished", code="request_aborted")
        if reason is None:
            return Piece(index, text, news.token_ids, news.logprobs, parts=parts, prompt_logprobs=news.prompt_logprobs)
        stop_reason = reader.stop_reason(news.stop_token)
        return Piece(
            index,
            text,
            news.token_ids,
            news.logprobs,
            _ending(reader, reason),
            stop_reason,
            parts,
            news.prompt_logprobs,
        )


def _ending(reader: AnswerReader, reason: str) -> str:
    """The reason as clients know it: an answer that stopped of itself and holds calls waits for their results."""
    return "tool_calls" if reason == "stop" and reader.num_calls else reason


async def _close(news: AsyncIterator[RequestEvent]) -> None:
    if isinstance(news, AsyncGenerator):
        await news.aclose()
