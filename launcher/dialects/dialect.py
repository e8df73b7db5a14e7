"""What a model's answers hold beside text, as its chat template tells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.coordinator.errors import InputError
from paceline.launcher.dialects.reasoning import CLOSING, OPENING
from paceline.launcher.dialects.tool_formats import TOOL_FORMATS, ToolFormat
from paceline.launcher.tokenizer import Tokenizer

NONE = "none"
"""The parser's name that switches parsing off."""
TOOL_PARSERS = (*TOOL_FORMATS, NONE)
REASONING_PARSERS = ("think", NONE)


@dataclass(frozen=True)
class Dialect:
    """How a model writes calls and reasoning."""

    tools: ToolFormat | None
    no_tools: str
    """Where there is no format: why tools cannot be used."""
    reasons: bool
    """Whether its answers may begin with reasoning in <think> tags."""
    template: str
    """The chat template's source."""
    token_ids: Mapping[str, int]
    """The ids of those tags that are tokens of their own."""

    def has_variable(self, name: str) -> bool:
        """Whether the chat template reads this variable."""
        return re.search(rf"\b{name}\b", self.template) is not None


def find_dialect(tokenizer: Tokenizer, tool_parser: str | None = None, reasoning_parser: str | None = None) -> Dialect:
    """The dialect of a tokenizer's chat template; a parser that is named is taken instead of the one found.

    Raises InputError for a parser that there is none of.
    """
    _check("tool_parser", tool_parser, TOOL_PARSERS)
    _check("reasoning_parser", reasoning_parser, REASONING_PARSERS)
    template = tokenizer.chat_template(with_tools=True)
    tools, no_tools = _tool_format(template, tool_parser)
    thinks = reasoning_parser == "think" or (reasoning_parser is None and OPENING in template and CLOSING in template)
    tags = [*((tools.opening, tools.closing) if tools is not None else ()), *((OPENING, CLOSING) if thinks else ())]
    added = tokenizer.added_tokens
    return Dialect(tools, no_tools, thinks, template, {tag: added[tag] for tag in tags if tag in added})


def _tool_format(template: str, name: str | None) -> tuple[ToolFormat | None, str]:
    if name == NONE:
        return None, "this server was started without a tool parser"
    if not re.search(r"\btools\b", template):
        return None, "the model's chat template does not know tools"
    if name is not None:
        return TOOL_FORMATS[name], ""
    # Qwen3-Coder's calls stand between the same tags, but are no JSON.
    fits = [each for each in TOOL_FORMATS.values() if any(mark in template for mark in each.template_marks)]
    if not fits or "<function=" in template:
        names = ", ".join(TOOL_FORMATS)
        return None, f"this server does not know how the model writes calls; --tool-parser names a format ({names})"
    return fits[0], ""


def _check(setting: str, name: str | None, known: tuple[str, ...]) -> None:
    if name is not None and name not in known:
        raise InputError(f"{setting} must be one of {', '.join(known)}, got {name!r}")
