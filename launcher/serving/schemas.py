"""The bodies that requests may have. A field that is not listed here is an error that names it, and so is a wrong type.

Values stay as JSON has them ("1" is no number); their ranges are those of SamplingParams. Fields of vLLM's that OpenAI
lacks are taken under vLLM's names. Nothing that would change the answer is accepted and passed over: what is not
supported may only have the value it has when absent (NEUTRAL).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.launcher.serving.errors import bad_request


class Body(BaseModel):
    """What all bodies share."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Known fields that are not supported, and the values beside null that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _take_out_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in cls.NEUTRAL.keys() & values.keys():
            value = values[name]
            # The types are compared too: 1 == True.
            if value is not None and not any(
                type(value) is type(neutral) and value == neutral for neutral in cls.NEUTRAL[name]
            ):
                raise bad_request(f"{name} is not supported by this server", name, "unsupported_parameter")
        return {name: value for name, value in values.items() if name not in cls.NEUTRAL}


class StreamOptions(Body):
    """What else a stream tells."""

    include_usage: bool = False
    """A last chunk without choices that holds the usage."""
    continuous_usage_stats: bool = False
    """With include_usage, the usage so far in every chunk."""

    NEUTRAL = {"include_obfuscation": (False, True)}


class JsonSchemaFormat(Body):
    """A schema, as OpenAI has it."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
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


class AnswerBody(Body):
    """What chat and plain completions share. None stands for the default."""

    model: str | None = None
    """One of the names that /v1/models lists; None is the one model that is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    prompt_logprobs: int | None = None
    """Of the prompt's tokens, with so many most likely ones; not with stream."""

    response_format: ResponseFormat | None = None
    """What the answer must look like; of this and the next five at most one."""
    structured_outputs: StructuredOutputs | None = None
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

    NEUTRAL = {
        "metadata": ({},),
        "store": (False,),
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


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    """developer is OpenAI's later name of system."""
    content: str | list[TextPart] | None = None
    """Text parts are joined by line breaks. Only an assistant's may be null, which is the empty text."""
    name: str | None = None
    reasoning_content: str | None = None
    """An earlier answer's, for templates that show it again."""

    NEUTRAL = {"refusal": (), "audio": (), "annotations": ([],), "tool_calls": ([],), "function_call": ()}


class ChatBody(AnswerBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    """The same as max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template, such as Qwen3's enable_thinking."""
    parallel_tool_calls: bool | None = None
    """Has no effect without tools."""

    NEUTRAL = AnswerBody.NEUTRAL | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "web_search_options": (),
        "echo": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "documents": ([],),
        "chat_template": (),
    }

    @property
    def max_tokens_param(self) -> str:
        """Which of its two names the client gave max_tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @model_validator(mode="before")
    @classmethod
    def _drop_forbidden_tools(cls, values: Any) -> Any:
        """Tools that must not be called change nothing: the model is not told of them."""
        if isinstance(values, dict) and values.get("tool_choice") == "none":
            return {name: value for name, value in values.items() if name != "tools"}
        return values


class CompletionBody(AnswerBody):
    """POST /v1/completions."""

    prompt: Any
    """A text, token ids, or a list of either."""
    max_tokens: int | None = 16
    """OpenAI's default; null is as many as the model's length leaves."""
    logprobs: int | None = None
    echo: bool | None = None

    NEUTRAL = AnswerBody.NEUTRAL | {"suffix": ("",), "best_of": (1,)}


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    """Of a prompt; a conversation's come from its template."""
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Any = Field(json_schema_extra={"type": "array", "items": {"type": "integer"}})
