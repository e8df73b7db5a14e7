"""From a request's messages to what chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.launcher.json_text import parse_json
from paceline.launcher.serving.errors import bad_request
from paceline.launcher.serving.schemas import Message
from paceline.launcher.serving.tool_schemas import FunctionDefinition, ToolCall

Turn = dict[str, Any]

_ONLY_OF = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """The conversation with each content one text. Raises ApiError (400) naming what does not fit together."""
    called: set[str] = set()
    """Ids of the calls so far."""
    turns = []
    for place, message in enumerate(messages):
        _check(place, message, called)
        called.update(call.id for call in message.tool_calls or ())
        turns.append(_turn(message))
    return turns


def template_tool(function: FunctionDefinition) -> dict[str, Any]:
    """A tool as templates write it down; what it says of parameters and strictness, as far as the model is told."""
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": described}


def _check(place: int, message: Message, called: set[str]) -> None:
    where = f"messages[{place}]"
    for field, role in _ONLY_OF.items():
        if getattr(message, field) and message.role != role:
            raise bad_request(f"{where}.{field} is for messages of the role {role}", f"{where}.{field}")
    if message.content is None and message.role != "assistant":
        raise bad_request(f"{where}.content must be a text", f"{where}.content")
    if message.role == "tool" and message.tool_call_id not in called:
        reason = "is missing" if message.tool_call_id is None else "is the id of no call in the messages before it"
        raise bad_request(f"{where}.tool_call_id {reason}", f"{where}.tool_call_id")
    if None not in (message.reasoning, message.reasoning_content) and message.reasoning != message.reasoning_content:
        raise bad_request(f"{where}.reasoning and reasoning_content differ; give one of them", f"{where}.reasoning")


def _turn(message: Message) -> Turn:
    content = message.content or ""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    turn: Turn = {"role": "system" if message.role == "developer" else message.role, "content": content}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        turn["reasoning_content"] = reasoning
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _call(call: ToolCall) -> dict[str, Any]:
    """A call with its arguments as an object, as templates want them; what is no object stays the text it is."""
    arguments: Any = call.function.arguments
    try:
        parsed = parse_json(arguments or "{}")
    except ValueError:  # a model's JSON may be broken, and it is to see what it said
        parsed = None
    if isinstance(parsed, dict):
        arguments = parsed
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
