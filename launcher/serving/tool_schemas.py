"""The parts of request bodies that have to do with tools: functions, the choice among them, calls in earlier turns."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from paceline.launcher.serving.body import Body

FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
MAX_TOOLS = 128
"""OpenAI's limits."""


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object's; left out, there are none."""
    strict: bool | None = None
    """Whether arguments have to follow the schema even where the model decides itself whether to call."""


class Tool(Body):
    """One of a request's tools."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """tool_choice: this function has to be called."""

    type: Literal["function"]
    function: FunctionName


Choice = Literal["none", "auto", "required"]


class CalledFunction(Body):
    """What an earlier answer called."""

    name: str = Field(pattern=FUNCTION_NAME)
    arguments: str
    """JSON text, as the model wrote it."""


class ToolCall(Body):
    """A call in an earlier answer."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: CalledFunction

    NEUTRAL: ClassVar = {"index": tuple(range(MAX_TOOLS))}
    """Clients that put a message together from a stream may leave it in."""
