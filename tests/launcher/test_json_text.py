"""JSON of lists in lists without end, and texts that are no Unicode, from files, servers and people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.launcher.clients.batch_lines import BadLine, read_line, read_result
from paceline.launcher.clients.conversation import Conversation
from paceline.launcher.clients.events import event_object
from paceline.launcher.clients.http import Response
from paceline.launcher.serving.schemas import Message
from paceline.launcher.serving.turns import turns_of

DEEP = "[" * 200_000


@pytest.fixture
def conversation() -> Conversation:
    client: Any = None  # nothing is asked
    return Conversation(client, "model", None)


def test_deep_json_is_none_that_can_be_read(conversation: Conversation) -> None:
    data = DEEP.encode()
    assert read_line(3, data) == BadLine(3, None, "it is no JSON that can be read")
    with pytest.raises(ValueError, match="nested too deeply"):
        read_result(data)
    assert event_object(data) is None
    assert Response(status=502, body=data).error_fields() == ("HTTP status 502", None, None)
    conversation.set(f"stop {DEEP}")
    assert conversation.fields == {"stop": DEEP}


def test_a_call_with_deep_arguments_keeps_them_as_text() -> None:
    """As a model that has lost its way writes them, and its client sends them back."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": DEEP}}
    message = Message.model_validate({"role": "assistant", "content": "", "tool_calls": [call]})
    (turn,) = turns_of([message])
    assert turn["tool_calls"][0]["function"]["arguments"] == DEEP


def test_a_conversation_with_half_characters_is_saved(conversation: Conversation, tmp_path: Path) -> None:
    conversation.reset(system="half \ud800")
    conversation.save(tmp_path / "saved.json")
    saved = (tmp_path / "saved.json").read_text(encoding="utf-8", errors="surrogatepass")
    assert json.loads(saved) == [{"role": "system", "content": "half \ud800"}]
