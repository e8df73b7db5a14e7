"""The bodies that requests may have. A field that is not listed here is an error that names it, and so is a wrong type.

Values stay as JSON has them ("1" is no number); their ranges are those of SamplingParams. Fields of vLLM's that OpenAI
lacks are taken under vLLM's names. Nothing that would change the answer is accepted and passed over: what is not
supported may only have the value it has when absent (NEUTRAL).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from paceline.launcher.serving.body import Body
from paceline.launcher.serving.tool_schemas import MAX_TOOLS, Choice, NamedTool, Tool, ToolCall


class StreamOptions(Body):
    """What else a stream tells."""

    include_usage: bool = False
    """A last chunk without choices that holds the usage."""
    continuous_usage_stats: bool = False
    """With include_usage, the usage so far in every chunk."""

    NEUTRAL: ClassVar = {"include_obfuscation": (False, True)}


FORMAT_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class JsonSchemaFormat(Body):
    """A schema, as OpenAI has it."""

    name: str = Field(pattern=FORMAT_NAME)
    """Has no effect, as description and strict: an answer always follows the schema."""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to ask for a form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's later way to ask for a form: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    """A JSON schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In Lark's notation as llguidance extends it, or in llama.cpp's GBNF."""
    json_object: bool | None = None


class SamplingBody(Body):
    """What all requests for answers share. None stands for the default."""

    model: str | None = None
    """One of the names that /v1/models lists; None is the one model that is served."""
    stream: bool | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    structured_outputs: StructuredOutputs | None = None
    """What the answer must look like; of this and the next four, or the endpoint's own field for it, at most one."""
    guided_json: dict[str, Any] | str | None = None
    """vLLM's earlier names of what structured_outputs holds."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Lower goes first."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    """Only requests of the same salt share cached prefixes."""
    user: str | None = None
    """Has no effect, as the next two."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    NEUTRAL: ClassVar = {
        "service_tier": ("auto", "default"),
        "best_of": (),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "truncate_prompt_tokens": (),
        "spaces_between_special_tokens": (True,),
        "bad_words": ([],),
        "logits_processors": ([],),
        "return_tokens_as_token_ids": (False,),
    }


class AnswerBody(SamplingBody):
    """What chat and plain completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    """Of the prompt's tokens, with so many most likely ones; not with stream."""
    response_format: ResponseFormat | None = None
    """What the answer must look like."""

    NEUTRAL: ClassVar = SamplingBody.NEUTRAL | {"metadata": ({},), "store": (False,)}


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """developer is OpenAI's later name of system."""
    content: str | list[TextPart] | None = None
    """Text parts are joined by line breaks. Only an assistant's may be null, which is the empty text."""
    name: str | None = None
    reasoning_content: str | None = None
    """An earlier answer's, for templates that show it again; it may as well be called reasoning."""
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool's answer: the call that it answers."""

    NEUTRAL: ClassVar = {"refusal": (), "audio": (), "annotations": ([],), "function_call": ()}
    INSTEAD: ClassVar = {"function_call": "use tool_calls"}


class ChatBody(AnswerBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    """The same as max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template, such as Qwen3's enable_thinking."""
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Choice | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    """false: at most one call. Has no effect without tools."""
    reasoning_effort: str | None = None
    """none, or what the model's chat template knows."""

    NEUTRAL: ClassVar = AnswerBody.NEUTRAL | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "verbosity": (),
        "web_search_options": (),
        "echo": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "documents": ([],),
        "chat_template": (),
    }
    INSTEAD: ClassVar = {"functions": "use tools", "function_call": "use tool_choice"}

    @property
    def max_tokens_param(self) -> str:
        """Which of its two names the client gave max_tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class CompletionBody(AnswerBody):
    """POST /v1/completions."""

    prompt: Any
    """A text, token ids, or a list of either."""
    max_tokens: int | None = 16
    """OpenAI's default; null is as many as the model's length leaves."""
    logprobs: int | None = None
    echo: bool | None = None

    NEUTRAL: ClassVar = AnswerBody.NEUTRAL | {"suffix": ("",), "best_of": (1,)}


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    """Of a prompt; a conversation's come from its template."""
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    """That the conversation is told of."""
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Any = Field(json_schema_extra={"type": "array", "items": {"type": "integer"}})
