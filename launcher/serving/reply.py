"""From the pieces of a request's answers to its response: one object, or a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.coordinator.messages import TokenLogprobs
from paceline.launcher.dialects.parts import Part
from paceline.launcher.serving.answers import Answers, Piece
from paceline.launcher.serving.delivery import Outbox, as_json
from paceline.launcher.serving.schemas import AnswerBody


@dataclass(slots=True)
class WholeChoice:
    """A choice as its pieces add up."""

    index: int
    text: str = ""
    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        """Take in the next piece."""
        self.text += piece.text
        self.parts.extend(piece.parts)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.prompt_logprobs.extend(piece.prompt_logprobs)
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason


class Shape(Protocol):
    """How one endpoint writes its choices."""

    kind: str
    """The `object` of a whole answer."""
    event_kind: str
    """The `object` of an event."""

    def whole(self, choice: WholeChoice) -> dict[str, Any]:
        """A choice of a whole answer."""

    def event(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        """A choice of an event; first: it is the choice's first."""

    def beside(self, choices: Sequence[WholeChoice]) -> dict[str, Any]:
        """What a whole answer says beside its choices."""


def new_id(kind: str) -> str:
    """An id as OpenAI's are: chatcmpl-… or cmpl-…."""
    return f"{kind}-{uuid.uuid4().hex}"


async def reply(
    outbox: Outbox, body: AnswerBody, answers: Answers, shape: Shape, *, answer_id: str, model: str
) -> None:
    """Run the answers and send them as the request wants them."""
    head = {
        "id": answer_id,
        "object": shape.event_kind if body.stream else shape.kind,
        "created": int(time.time()),
        "model": model,
    }
    if body.stream:
        await _stream(outbox, body, answers, shape, head)
        return
    choices = [WholeChoice(index) for index in range(answers.count)]

    async def collect(piece: Piece) -> None:
        choices[piece.index].add(piece)

    await answers.run(collect)
    whole = [shape.whole(choice) for choice in choices]
    await outbox.whole({**head, "choices": whole, "usage": answers.usage(), **shape.beside(choices)})


async def _stream(outbox: Outbox, body: AnswerBody, answers: Answers, shape: Shape, head: dict[str, Any]) -> None:
    options = body.stream_options
    with_usage = options is not None and options.include_usage
    usage_so_far = with_usage and options is not None and options.continuous_usage_stats
    begun = [False] * answers.count
    around_texts: dict[int, tuple[bytes, bytes]] = {}
    # Of all that the events say only the choice differs from one to the next.
    before = b'data: %b,"choices":[' % as_json(head)[:-1]
    after = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def choice(piece: Piece, *, first: bool) -> bytes:
        text = None if first else piece.only_text
        if text is None:
            return as_json(shape.event(piece, first=first))
        # And of such a choice only the text does.
        if piece.index not in around_texts:
            around_texts[piece.index] = _around_text(shape, piece.index)
        start, end = around_texts[piece.index]
        return start + as_json(text) + end

    async def show(piece: Piece) -> None:
        first = not begun[piece.index]
        begun[piece.index] = True
        if not (first or piece.text or piece.parts or piece.logprobs or piece.finish_reason):
            return  # tokens whose text is not settled yet
        ending = b'],"usage":%b}\n\n' % as_json(answers.usage()) if usage_so_far else after
        await outbox.write(before + choice(piece, first=first) + ending)

    await answers.run(show)
    if with_usage:
        await outbox.event({**head, "choices": [], "usage": answers.usage()})
    await outbox.end()


def _around_text(shape: Shape, index: int) -> tuple[bytes, bytes]:
    """What stands in a choice's event before and after a text that is all that is new."""
    mark = "\0"  # which no event has elsewhere
    before, _, after = as_json(shape.event(Piece(index, mark, (), ()), first=False)).partition(as_json(mark))
    return before, after
