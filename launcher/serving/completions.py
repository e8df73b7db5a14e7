"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.coordinator.messages import TokenLogprobs
from paceline.launcher.answer_text import AnswerText
from paceline.launcher.serving.answer_reader import AnswerReader
from paceline.launcher.serving.answers import Piece
from paceline.launcher.serving.delivery import Outbox
from paceline.launcher.serving.door import Door
from paceline.launcher.serving.engine_api import EngineInfo
from paceline.launcher.serving.prompts import Prompt, check_length, check_token_ids, split_prompts
from paceline.launcher.serving.record import record_of
from paceline.launcher.serving.reply import WholeChoice, new_id, reply
from paceline.launcher.serving.sampling import completion_sampling
from paceline.launcher.serving.schemas import CompletionBody
from paceline.launcher.serving.strict_json import StrictJsonRoute
from paceline.launcher.serving.token_texts import TokenTexts, finite


def completion_routes(door: Door) -> APIRouter:
    """The route of plain prompts."""
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        info = door.ready_engine()
        door.check_model(body.model)
        params = completion_sampling(body, info, door.tokenizer.backend is not None)
        parts = split_prompts(body.prompt)
        record = record_of(request)

        async def work(outbox: Outbox) -> None:
            with door.admission.hold(len(parts) * params.n, "prompt" if params.n == 1 else "n"):
                await door.grammars.check(body)
                # The default is no wish: it may be cut to what the prompt leaves.
                wanted = params.max_tokens if "max_tokens" in body.model_fields_set else None
                prompts = [
                    await _read(door, part, info, wanted, "prompt" if len(parts) == 1 else f"prompt[{place}]")
                    for place, part in enumerate(parts)
                ]
                answer_id = new_id("cmpl")
                answers = door.answers(
                    body,
                    prompts,
                    params,
                    lambda single: AnswerReader(AnswerText(door.tokenizer, single)),
                    answer_id,
                    record,
                )
                echoes = [_echo(door, prompt) for prompt in prompts for _ in range(params.n)] if body.echo else None
                shape = CompletionShape(door.token_texts, answers.count, params.logprobs is not None, echoes)
                await reply(outbox, body, answers, shape, answer_id=answer_id, model=door.model_name)

        return door.deliver(request, work)

    return router


async def _read(door: Door, part: str | list[int], info: EngineInfo, max_tokens: int | None, param: str) -> Prompt:
    if isinstance(part, str):
        prompt = await door.prompts.text(part, param)
    else:
        check_token_ids(part, info, param)
        prompt = Prompt(part)
    check_length(prompt, max_tokens, info, param=param)
    return prompt


def _echo(door: Door, prompt: Prompt) -> str:
    """The prompt's text, as it was given or as its tokens read."""
    if prompt.text is not None:
        return prompt.text
    return "" if door.tokenizer.backend is None else door.token_texts.decode(prompt.token_ids)


class CompletionShape:
    """Choices as /v1/completions writes them."""

    kind = "text_completion"
    event_kind = "text_completion"

    def __init__(self, token_texts: TokenTexts, count: int, with_logprobs: bool, echoes: Sequence[str] | None) -> None:
        self._token_texts = token_texts
        self._with_logprobs = with_logprobs
        self._echoes = echoes
        self._offsets = [0] * count
        """How many characters the tokens of each choice had so far."""

    def whole(self, choice: WholeChoice) -> dict[str, Any]:
        """A choice of a whole answer."""
        return self._choice(choice, first=True)

    def event(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        """A choice of an event."""
        return self._choice(piece, first=first)

    def _choice(self, news: WholeChoice | Piece, *, first: bool) -> dict[str, Any]:
        echo = self._echoes[news.index] if first and self._echoes is not None else ""
        return {
            "index": news.index,
            "text": echo + news.text,
            "logprobs": self._logprobs(news.index, news.token_ids, news.logprobs) if self._with_logprobs else None,
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }

    def _logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        texts = [self._token_texts[token_id][0] for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [finite(each.chosen) for each in logprobs],
            "top_logprobs": [
                {
                    # As OpenAI's, the chosen token is always among them.
                    **{
                        self._token_texts[top][0]: finite(logprob)
                        for top, logprob in zip(each.top_ids, each.top, strict=True)
                    },
                    text: finite(each.chosen),
                }
                for text, each in zip(texts, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }
