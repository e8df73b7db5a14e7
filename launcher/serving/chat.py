"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.coordinator.messages import TokenLogprobs
from paceline.launcher.dialects.parts import Arguments, Call, Content, Reasoning
from paceline.launcher.serving.answers import Piece
from paceline.launcher.serving.conversation import held_to, reader_of, template_options
from paceline.launcher.serving.delivery import Outbox
from paceline.launcher.serving.door import Door
from paceline.launcher.serving.prompts import Prompt, check_length
from paceline.launcher.serving.record import record_of
from paceline.launcher.serving.reply import WholeChoice, new_id, reply
from paceline.launcher.serving.sampling import chat_sampling
from paceline.launcher.serving.schemas import ChatBody
from paceline.launcher.serving.strict_json import StrictJsonRoute
from paceline.launcher.serving.token_texts import TokenTexts, finite, prompt_logprobs
from paceline.launcher.serving.tool_schemas import NamedTool
from paceline.launcher.serving.tool_use import read_tools


def chat_routes(door: Door) -> APIRouter:
    """The route of conversations."""
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        info = door.ready_engine()
        record = record_of(request)
        door.check_model(body.model, record)
        params = chat_sampling(body, info, door.tokenizer.backend is not None, door.settings.sampling_defaults)
        functions = [tool.function for tool in body.tools or ()]
        choice = body.tool_choice.function if isinstance(body.tool_choice, NamedTool) else body.tool_choice
        use = read_tools(functions, choice, body.parallel_tool_calls, door.dialect)
        options = template_options(body.chat_template_kwargs, body.reasoning_effort, door.dialect)

        async def work(outbox: Outbox) -> None:
            with door.admission.hold(params.n, "n"):
                await door.grammars.check(body, use)
                prompt = await door.prompts.chat(body.messages, options, () if use is None else use.told)
                check_length(prompt, params.max_tokens, info, param="messages", max_tokens_param=body.max_tokens_param)
                answer_id = new_id("chatcmpl")
                rules = held_to(params, use, prompt, door.dialect)
                reader = reader_of(door.tokenizer, use, prompt, door.dialect)
                answers = door.answers(body, [prompt], rules, reader, answer_id, record, use)
                shape = ChatShape(
                    door.token_texts, prompt, body.prompt_logprobs, with_logprobs=params.logprobs is not None
                )
                await reply(outbox, body, answers, shape, answer_id=answer_id, model=door.model_name)

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
        content, reasoning, calls = said_in(choice)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        message["refusal"] = None
        if reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message["tool_calls"] = [_call(call) for call in calls.values()]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def event(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        """A choice of an event; the first says whose turn it is."""
        content, reasoning, calls = said_in(piece)
        delta: dict[str, Any] = {"role": "assistant", "content": content} if first else {}
        if content:
            delta["content"] = content
        if reasoning:
            delta |= _reasoning(reasoning)
        if calls:
            delta["tool_calls"] = [{"index": index, **_call(call)} for index, call in calls.items()]
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


@dataclass(slots=True)
class SaidCall:
    """What some parts say of one call."""

    begin: Call | None = None
    """None where it had begun before them."""
    arguments: str = ""


def said_in(news: Piece | WholeChoice) -> tuple[str, str, dict[int, SaidCall]]:
    """Content, reasoning and, by their index, the calls of what is text or consists of parts."""
    content, reasoning = news.text, ""
    calls: dict[int, SaidCall] = {}
    for part in news.parts:
        match part:
            case Content():
                content += part.text
            case Reasoning():
                reasoning += part.text
            case Call():
                calls[part.index] = SaidCall(part)
            case Arguments():
                calls.setdefault(part.index, SaidCall()).arguments += part.text
    return content, reasoning, calls


def _call(call: SaidCall) -> dict[str, Any]:
    if call.begin is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.begin.name, "arguments": call.arguments}
    return {"id": call.begin.call_id, "type": "function", "function": function}


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients read: vLLM's of today, and the one that it and DeepSeek had before."""
    return {"reasoning": text, "reasoning_content": text}
