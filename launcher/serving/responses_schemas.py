"""The body of POST /v1/responses (https://platform.openai.com/docs/api-reference/responses/create)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from paceline.launcher.serving.body import Body
from paceline.launcher.serving.schemas import FORMAT_NAME, SamplingBody
from paceline.launcher.serving.tool_schemas import MAX_TOOLS, Choice, FunctionDefinition, FunctionName

_KEEPS_NOTHING = "the server keeps no responses: send the whole conversation as input"


class InputPart(Body):
    """A piece of a message."""

    type: Literal["input_text", "output_text"]
    """output_text is what an earlier answer said."""
    text: str

    NEUTRAL: ClassVar = {"annotations": ([],), "logprobs": ([],)}


class ReasoningPart(Body):
    """A piece of an earlier answer's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class InputItem(Body):
    """A message, a call, what a call gave, or an earlier answer's reasoning; items of an output may be sent again."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    """Has no effect, as the next."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    """Of a message."""
    content: str | list[InputPart | ReasoningPart] | None = None
    """Of a message, or a list of a reasoning's pieces."""
    call_id: str | None = Field(default=None, min_length=1)
    """Of a call, and of what it gave."""
    name: str | None = None
    """Of the function that was called."""
    arguments: str | None = None
    """Of a call, as JSON text."""
    output: str | list[InputPart] | None = None
    """What a call gave."""

    NEUTRAL: ClassVar = {"summary": ([],), "encrypted_content": (), "phase": ()}


class OfTypeFunction(Body):
    """What says first that it is a function."""

    type: Literal["function"]


class ResponsesTool(FunctionDefinition, OfTypeFunction):
    """A function that the model may call."""


class ResponsesNamedTool(FunctionName, OfTypeFunction):
    """tool_choice: this function has to be called."""


class TextFormat(Body):
    """What the text of an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, pattern=FORMAT_NAME)
    """Of a schema; has no effect, as description and strict: an answer always follows the schema."""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    """How the text of an answer is written."""

    format: TextFormat | None = None

    NEUTRAL: ClassVar = {"verbosity": ("medium",)}


class ReasoningSettings(Body):
    """How the model reasons."""

    effort: str | None = None
    """none, or what the model's chat template knows."""

    NEUTRAL: ClassVar = {"summary": ("auto",), "generate_summary": ("auto",)}
    """A summary is what there is of one: the reasoning itself is given instead."""


class ResponsesBody(SamplingBody):
    """POST /v1/responses."""

    input: str | list[InputItem]
    instructions: str | None = None
    """The system's message before the input."""
    max_output_tokens: int | None = None
    tools: list[ResponsesTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Choice | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    """Has no effect; the response holds it again."""

    NEUTRAL: ClassVar = SamplingBody.NEUTRAL | {
        "store": (False,),
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "include": ([],),
        "truncation": ("disabled",),
        "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
        "top_logprobs": (0,),
        "max_tool_calls": (),
        "prompt": (),
        "prompt_cache_retention": ("in_memory", "24h"),
    }
    INSTEAD: ClassVar = {
        "store": _KEEPS_NOTHING,
        "previous_response_id": _KEEPS_NOTHING,
        "conversation": _KEEPS_NOTHING,
    }
