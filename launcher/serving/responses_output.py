"""An answer as /v1/responses writes it: output items, and the events that tell how they grow.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from typing import Any

from paceline.launcher.dialects.parts import Arguments, Call, Content, Part, Reasoning
from paceline.launcher.serving.errors import ApiError

Event = dict[str, Any]

_TEXT_KINDS = {"message": "output_text", "reasoning": "reasoning_text"}
"""The part that holds the text of an item, and the stem of its events' names."""


class ResponseWriter:
    """Builds one response from the parts of its answer; every method yields the events that tell of it."""

    def __init__(self, head: dict[str, Any]) -> None:
        """head: the response's own fields, without those that the answer decides."""
        self._head = head
        self._status = "in_progress"
        self._usage: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        self._items: list[dict[str, Any]] = []
        """The last one may still grow."""
        self._open = False
        """Whether it does."""
        self._number = 0

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        cut = self._status == "incomplete"
        return {
            **self._head,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": copy.deepcopy(self._items),
            "usage": self._usage,
        }

    def begin(self) -> Iterator[Event]:
        """The answer has begun."""
        yield self._event("response.created", response=self.response())
        yield self._event("response.in_progress", response=self.response())

    def add(self, part: Part) -> Iterator[Event]:
        """More of the answer."""
        match part:
            case Content():
                yield from self._add_text("message", part.text)
            case Reasoning():
                yield from self._add_text("reasoning", part.text)
            case Call():
                yield from self._close("completed")
                call = {"call_id": part.call_id, "name": part.name, "arguments": ""}
                yield from self._begin_item("function_call", call)
            case Arguments():
                self._items[-1]["arguments"] += part.text
                yield self._item_event("response.function_call_arguments.delta", delta=part.text)

    def end(self, finish_reason: str | None, usage: dict[str, Any]) -> Iterator[Event]:
        """The answer is over, with its usage as the chat has it."""
        cut = finish_reason == "length"
        yield from self._close("incomplete" if cut else "completed")
        self._status = "incomplete" if cut else "completed"
        self._usage = _usage(usage)
        yield self._event(f"response.{self._status}", response=self.response())

    def fail(self, error: ApiError) -> Iterator[Event]:
        """The answer cannot be finished."""
        if self._open:
            self._items[-1]["status"] = "incomplete"
        self._status = "failed"
        self._error = {"code": error.code or "server_error", "message": error.message}
        yield self._event("response.failed", response=self.response())

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if not (self._open and self._items[-1]["type"] == kind):
            yield from self._close("completed")
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin_item(kind, {**own, "content": []})
            part: dict[str, Any] = {"type": _TEXT_KINDS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            yield self._part_event("response.content_part.added", part=dict(part))
            self._items[-1]["content"] = [part]
        self._items[-1]["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._part_event(f"response.{_TEXT_KINDS[kind]}.delta", delta=text, **more)

    def _begin_item(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=copy.deepcopy(item))

    def _close(self, status: str) -> Iterator[Event]:
        """The last item is whole, or was cut."""
        if not self._open:
            return
        item = self._items[-1]
        if item["type"] == "function_call":
            yield self._item_event(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        else:
            (part,) = item["content"]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield self._part_event(f"response.{part['type']}.done", text=part["text"], **more)
            yield self._part_event("response.content_part.done", part=dict(part))
        item["status"] = status
        self._open = False
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=copy.deepcopy(item))

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The chat's usage object under the names that it has here."""
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
