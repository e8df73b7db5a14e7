"""How models write calls of tools in their answers.

hermes, which Qwen2.5, Qwen3 and Hermes models use (https://github.com/NousResearch/Hermes-Function-Calling):

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

llama, of Llama 3.1 and 3.2
(https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling); <|python_tag|> may stand
before it, further calls follow after a semicolon:

    {"name": "get_weather", "parameters": {"city": "Oslo"}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

Shape = tuple[tuple[str, ...], ...]
"""Symbols that follow each other, whitespace between them or not; each is one of some texts."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """One way to write calls."""

    name: str
    opening: str
    """The tag that begins a call."""
    closing: str
    """The tag that ends one; may be empty."""
    arguments_keys: tuple[str, ...]
    """The key before the arguments; the first one is how the model was taught to write it."""
    bare: bool
    """Whether a call may also stand without its opening tag, where the answer or another call's successor begins."""
    template_marks: tuple[str, ...]
    """Texts of chat templates that teach this format; any one of them tells it."""
    several: bool
    """Whether models of this format are taught to make several calls in one answer."""

    def headers(self, names: Iterable[str], *, opened: bool) -> tuple[Shape, ...]:
        """All that a call of one of these functions may begin with, up to the brace that opens its arguments."""
        choices = tuple(json.dumps(name) for name in names)
        keys = tuple(json.dumps(key) for key in self.arguments_keys)
        call: Shape = (('"name"',), (":",), choices, (",",), keys, (":",), ("{",))
        kind: Shape = (('"type"',), (":",), ('"function"',), (",",))
        begin: Shape = ((self.opening,), ("{",)) if opened else (("{",),)
        return (begin + call, begin + kind + call)

    def tails(self) -> tuple[Shape, ...]:
        """All that may stand after a call's arguments and belongs to it, the most likely first."""
        if not self.closing:
            return ((("}",),),)
        # Models forget the second brace, or the tag.
        return ((("}",), (self.closing,)), ((self.closing,),), (("}",),))


HERMES = ToolFormat(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    arguments_keys=("arguments",),
    bare=False,
    template_marks=("<tool_call>",),
    several=True,
)
LLAMA = ToolFormat(
    name="llama",
    opening="<|python_tag|>",
    closing="",
    arguments_keys=("parameters", "arguments"),
    bare=True,
    template_marks=("<|python_tag|>", '"parameters": dictionary'),
    several=False,
)

TOOL_FORMATS = {each.name: each for each in (HERMES, LLAMA)}
