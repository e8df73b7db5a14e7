"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.coordinator.messages import TokenLogprobs
from paceline.launcher.serving.answers import Piece
from paceline.launcher.serving.delivery import Outbox
from paceline.launcher.serving.door import Door
from paceline.launcher.serving.prompts import Prompt, check_length
from paceline.launcher.serving.record import record_of
from paceline.launcher.serving.reply import WholeChoice, new_id, reply
from paceline.launcher.serving.sampling import chat_sampling
from paceline.launcher.serving.schemas import ChatBody
from paceline.launcher.serving.token_texts import TokenTexts, finite, prompt_logprobs


def chat_routes(door: Door) -> APIRouter:
    """The route of conversations."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        info = door.ready_engine()
        door.check_model(body.model)
        params = chat_sampling(body, info, door.tokenizer.backend is not None)
        record = record_of(request)

        async def work(outbox: Outbox) -> None:
            with door.admission.hold(params.n, "n"):
                await door.grammars.check(body)
                prompt = await door.prompts.chat(body.messages, body.chat_template_kwargs)
                check_length(prompt, params.max_tokens, info, param="messages", max_tokens_param=body.max_tokens_param)
                answer_id = new_id("chatcmpl")
                answers = door.answers(body, [prompt], params, answer_id, record.started)
                try:
                    shape = ChatShape(
                        door.token_texts, prompt, body.prompt_logprobs, with_logprobs=params.logprobs is not None
                    )
                    await reply(outbox, body, answers, shape, answer_id=answer_id, model=door.model_name)
                finally:
                    record.answer = answers.log_fields(door.settings.log_prompts)

        return door.deliver(request, work)

    return router


class ChatShape:
    """Choices as /v1/chat/completions writes them."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def __init__(
        self, token_texts: TokenTexts, prompt: Prompt, prompt_logprobs: int | None, *, with_logprobs: bool
    ) -> None:
        """prompt_logprobs: as the request asks for them."""
        self._token_texts = token_texts
        self._prompt = prompt
        self._prompt_logprobs = prompt_logprobs
        self._with_logprobs = with_logprobs

    def whole(self, choice: WholeChoice) -> dict[str, Any]:
        """A choice of a whole answer."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def event(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        """A choice of an event; the first says whose turn it is."""
        delta: dict[str, Any] = {"role": "assistant", "content": piece.text} if first else {}
        if piece.text:
            delta["content"] = piece.text
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": self._logprobs(piece.token_ids, piece.logprobs) if piece.logprobs else None,
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        return choice

    def beside(self, choices: Sequence[WholeChoice]) -> dict[str, Any]:
        """The prompt's log-probabilities, which all choices share."""
        top = self._prompt_logprobs
        if top is None:
            return {}
        scores = choices[0].prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(self._token_texts, self._prompt.token_ids, scores, top)}

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = [
            {
                **self._token(token_id, each.chosen),
                "top_logprobs": [self._token(*top) for top in zip(each.top_ids, each.top, strict=True)],
            }
            for token_id, each in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._token_texts[token_id]
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}
