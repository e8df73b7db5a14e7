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
from paceline.launcher.serving.token_texts import TokenTexts, finite, prompt_logprobs


def completion_routes(door: Door) -> APIRouter:
    """The route of plain prompts."""
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        info = door.ready_engine()
        record = record_of(request)
        door.check_model(body.model, record)
        params = completion_sampling(body, info, door.tokenizer.backend is not None, door.settings.sampling_defaults)
        parts = split_prompts(body.prompt)

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
                of_choices = [prompt for prompt in prompts for _ in range(params.n)]
                shape = CompletionShape(door.token_texts, body, of_choices)
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


class CompletionShape:
    """Choices as /v1/completions writes them."""

    kind = "text_completion"
    event_kind = "text_completion"

    def __init__(self, token_texts: TokenTexts, body: CompletionBody, prompts: Sequence[Prompt]) -> None:
        """prompts: each choice's."""
        self._token_texts = token_texts
        self._body = body
        self._prompts = prompts
        self._offsets = [0] * len(prompts)
        """How many characters the tokens of each choice had so far."""

    def whole(self, choice: WholeChoice) -> dict[str, Any]:
        """A choice of a whole answer."""
        return self._choice(choice, first=True)

    def event(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        """A choice of an event."""
        return self._choice(piece, first=first)

    def _choice(self, news: WholeChoice | Piece, *, first: bool) -> dict[str, Any]:
        prompt = self._prompts[news.index]
        echoed = first and self._body.echo
        choice: dict[str, Any] = {
            "index": news.index,
            "text": self._text(prompt) + news.text if echoed else news.text,
            "logprobs": None,
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }
        if self._body.logprobs is not None:
            token_ids: list[int] = [*prompt.token_ids, *news.token_ids] if echoed else [*news.token_ids]
            scores = [None, *news.prompt_logprobs, *news.logprobs] if echoed else [*news.logprobs]
            choice["logprobs"] = self._logprobs(news.index, token_ids, scores, self._body.logprobs)
        if self._body.prompt_logprobs is not None:
            top = self._body.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(self._token_texts, prompt.token_ids, news.prompt_logprobs, top)
        return choice

    def beside(self, choices: Sequence[WholeChoice]) -> dict[str, Any]:
        """Nothing: all is said in the choices."""
        return {}

    def _text(self, prompt: Prompt) -> str:
        """The prompt's text, as it was given or as its tokens read."""
        return self._token_texts.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], top: int
    ) -> dict[str, Any]:
        """None stands for the first token of a prompt, which has no probability."""
        texts = [self._token_texts[token_id][0] for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [each and finite(each.chosen) for each in logprobs],
            "top_logprobs": [
                # As OpenAI's, the chosen token is always among them.
                each and {**self._top(each, top), text: finite(each.chosen)}
                for text, each in zip(texts, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, logprobs: TokenLogprobs, top: int) -> dict[str, float]:
        best = zip(logprobs.top_ids[:top], logprobs.top[:top], strict=True)
        return {self._token_texts[token_id][0]: finite(logprob) for token_id, logprob in best}
