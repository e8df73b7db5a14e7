"""POST /v1/responses."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.dialects.parts import Content
from paceline.launcher.serving.answers import Answers, Piece
from paceline.launcher.serving.conversation import held_to, reader_of, template_options
from paceline.launcher.serving.delivery import Outbox
from paceline.launcher.serving.door import Door
from paceline.launcher.serving.errors import ApiError, bad_request
from paceline.launcher.serving.prompts import Prompt, check_length
from paceline.launcher.serving.record import record_of
from paceline.launcher.serving.reply import new_id
from paceline.launcher.serving.responses_input import messages_of
from paceline.launcher.serving.responses_output import Event, ResponseWriter
from paceline.launcher.serving.responses_schemas import ResponsesBody
from paceline.launcher.serving.sampling import responses_sampling
from paceline.launcher.serving.schemas import Message
from paceline.launcher.serving.strict_json import StrictJsonRoute
from paceline.launcher.serving.tool_use import ToolUse, read_tools


def response_routes(door: Door) -> APIRouter:
    """The route of responses, OpenAI's newer way to ask for an answer in a conversation."""
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        info = door.ready_engine()
        record = record_of(request)
        door.check_model(body.model, record)
        params = responses_sampling(body, info, door.tokenizer.backend is not None, door.settings.sampling_defaults)
        messages = messages_of(body.instructions, body.input)
        use = read_tools(body.tools or (), body.tool_choice, body.parallel_tool_calls, door.dialect, path="tools[{}]")
        effort = None if body.reasoning is None else body.reasoning.effort
        options = template_options(body.chat_template_kwargs, effort, door.dialect, param="reasoning.effort")

        async def work(outbox: Outbox) -> None:
            with door.admission.hold(1, "input"):
                await door.grammars.check(body, use)
                prompt = await _prompt(door, messages, options, use)
                check_length(prompt, params.max_tokens, info, param="input", max_tokens_param="max_output_tokens")
                rules = held_to(params, use, prompt, door.dialect)
                reader = reader_of(door.tokenizer, use, prompt, door.dialect)
                answer_id = new_id("resp")
                answers = door.answers(body, [prompt], rules, reader, answer_id, record, use)
                writer = ResponseWriter(_head(body, params, answer_id, door.model_name))
                await (_stream if body.stream else _whole)(outbox, answers, writer)

        return door.deliver(request, work)

    return router


async def _prompt(door: Door, messages: list[Message], options: dict[str, Any], use: ToolUse | None) -> Prompt:
    """The prompt; what the template says against the messages is said of the input that they were made of."""
    try:
        return await door.prompts.chat(messages, options, () if use is None else use.told)
    except ApiError as error:
        if error.param is None or not error.param.startswith("messages"):
            raise
        raise bad_request(error.message.replace(error.param, "input"), "input", error.code) from error


async def _whole(outbox: Outbox, answers: Answers, writer: ResponseWriter) -> None:
    """Run the answer and send it as one object."""

    async def collect(piece: Piece) -> None:
        for _ in _events(piece, answers, writer):
            pass

    await answers.run(collect)
    await outbox.whole(writer.response())


async def _stream(outbox: Outbox, answers: Answers, writer: ResponseWriter) -> None:
    """Run the answer and send it as events."""

    async def send(events: Iterable[Event]) -> None:
        for event in events:
            await outbox.event(event, event["type"])

    async def fail(error: ApiError) -> None:
        await send(writer.fail(error))
        await outbox.end(mark=False)

    async def show(piece: Piece) -> None:
        if not outbox.started:
            outbox.on_failure = fail
            await send(writer.begin())
        await send(_events(piece, answers, writer))

    await answers.run(show)
    await outbox.end(mark=False)


def _events(piece: Piece, answers: Answers, writer: ResponseWriter) -> Iterable[Event]:
    if piece.text:
        yield from writer.add(Content(piece.text))
    for part in piece.parts:
        yield from writer.add(part)
    if piece.finish_reason is not None:
        yield from writer.end(piece.finish_reason, answers.usage())


def _head(body: ResponsesBody, params: SamplingParams, answer_id: str, model: str) -> dict[str, Any]:
    """What a response says of the request."""
    tools = [
        {"description": None, "parameters": None, "strict": None, **tool.model_dump(exclude_none=True)}
        for tool in body.tools or ()
    ]
    choice = "auto" if body.tool_choice is None else body.tool_choice
    return {
        "id": answer_id.replace("-", "_"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "tools": tools,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "text": {"format": _format(body)},
        "truncation": "disabled",
        "previous_response_id": None,
        "store": False,
        "background": False,
        "metadata": body.metadata or {},
        "user": body.user,
        "service_tier": "default",
    }


def _format(body: ResponsesBody) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)
