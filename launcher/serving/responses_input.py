"""From the input of /v1/responses to the messages of a conversation."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.launcher.serving.errors import bad_request
from paceline.launcher.serving.responses_schemas import InputItem, InputPart, ReasoningPart
from paceline.launcher.serving.schemas import Message
from paceline.launcher.serving.tool_schemas import FUNCTION_NAME, CalledFunction, ToolCall

_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content",),
}
"""What each type of item needs; the others' fields it must not have."""
_OPTIONAL = {"reasoning": ("content",)}


def messages_of(instructions: str | None, given: str | Sequence[InputItem]) -> list[Message]:
    """The conversation: what an answer said, thought and called is one message again.

    Raises ApiError (400) naming what is missing or does not fit.
    """
    messages = [] if instructions is None else [Message(role="system", content=instructions)]
    if isinstance(given, str):
        return [*messages, Message(role="user", content=given)]
    if not given:
        raise bad_request("input must hold at least one item", "input")
    called: set[str] = set()
    for place, item in enumerate(given):
        where = f"input[{place}]"
        _check_fields(item, where)
        match item.type:
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                messages.append(Message(role="assistant", reasoning_content=_text(item.content, where, ReasoningPart)))
            case "function_call":
                _add_call(messages, item, where)
                called.add(item.call_id or "")
            case "function_call_output":
                if item.call_id not in called:
                    raise bad_request(f"{where}.call_id is the id of no call before it", f"{where}.call_id")
                output = _text(item.output, where, InputPart)
                messages.append(Message(role="tool", content=output, tool_call_id=item.call_id))
    return messages


def _check_fields(item: InputItem, where: str) -> None:
    needed = _FIELDS[item.type]
    for field in {field for fields in _FIELDS.values() for field in fields}:
        value = getattr(item, field)
        if value is None and field in needed and field not in _OPTIONAL.get(item.type, ()):
            raise bad_request(f"{where}.{field} is missing", f"{where}.{field}")
        if value is not None and field not in needed:
            raise bad_request(f"{where}.{field} is no field of an item of type {item.type}", f"{where}.{field}")


def _add_message(messages: list[Message], item: InputItem, where: str) -> None:
    content = _text(item.content, where, InputPart)
    last = messages[-1] if messages else None
    if item.role == "assistant" and last is not None and last.role == "assistant" and last.content is None:
        last.content = content  # what was thought or called before it
    else:
        messages.append(Message(role=item.role or "user", content=content))


def _add_call(messages: list[Message], item: InputItem, where: str) -> None:
    name = item.name or ""
    if not re.fullmatch(FUNCTION_NAME, name):
        raise bad_request(f"{where}.name must be letters, digits, _ and -, at most 64", f"{where}.name")
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant"))
    function = CalledFunction(name=name, arguments=item.arguments or "")
    messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), ToolCall(id=item.call_id or "", function=function)]


def _text(
    content: str | Sequence[InputPart | ReasoningPart] | None, where: str, kind: type[InputPart] | type[ReasoningPart]
) -> str:
    """The parts as one text; they must be of one kind."""
    if content is None or isinstance(content, str):
        return content or ""
    for place, part in enumerate(content):
        if not isinstance(part, kind):
            field = f"{where}.content[{place}].type"
            raise bad_request(f"{field} does not fit an item of this type", field)
    return "\n".join(part.text for part in content)
