"""How the tokens of one request are chosen and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.coordinator.checks import MAX_INT32, check_integer, check_number, check_switch, shown
from paceline.coordinator.errors import InputError

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_GRAMMAR_BYTES = 256 * 1024

_INTEGERS = {"n": (1, MAX_CHOICES), "top_k": (-1, MAX_INT32), "min_tokens": (0, MAX_INT32)}
_OPTIONAL_INTEGERS = {
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (0, MAX_INT32),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_NUMBERS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request; names and meanings follow vLLM's and OpenAI's.

    Every value is checked on construction; a bad one raises InputError naming the field. Containers are copied, `stop`
    and `stop_token_ids` to tuples; None in place of one of them, or of `logit_bias`, stands for an empty one.
    """

    n: int = 1
    """Number of independent answers to the prompt."""
    temperature: float = 1.0
    """0 is exact argmax; above, logits are divided by it."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; 0 is argmax, 1 is off."""
    top_k: int = 0
    """Keep the k most likely tokens (ties with the k-th included); 0 or -1 is off, 1 is argmax."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    seed: int | None = None
    """Makes the request reproducible alone, in any batch and at any number of ranks; None draws one."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that the output already holds."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit once per occurrence in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of the given token ids."""
    max_tokens: int | None = 16
    """Most tokens to generate; None generates until the model's length, 0 only reports prompt_logprobs."""
    min_tokens: int = 0
    """End-of-text and stop ids are not chosen before this many tokens."""
    stop: str | Sequence[str] = ()
    """Texts that end the answer; they are cut from it unless include_stop_str_in_output."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the answer, beside the model's own end-of-text ids."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on after the model's end-of-text ids (stop_token_ids still stop)."""
    logprobs: int | None = None
    """With each token report its log-probability and those of this many most likely tokens."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, but for the first; it is then computed in full, whatever the cache holds."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    grammar: str | None = None
    """What the answer must follow, as a grammar in llguidance's own notation (Lark's dialect, or its JSON form).

    paceline.structured_output makes them of JSON schemas, regular expressions, choices and grammars.
    """

    def __post_init__(self) -> None:
        for name, bounds in _INTEGERS.items():
            check_integer(name, getattr(self, name), *bounds)
        for name, bounds in _OPTIONAL_INTEGERS.items():
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), *bounds)
        for name, bounds in _NUMBERS.items():
            check_number(name, getattr(self, name), *bounds)
        check_number("repetition_penalty", self.repetition_penalty, 0, 100, above_low=True)
        for name in _SWITCHES:
            check_switch(name, getattr(self, name))
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InputError("max_tokens must be at least 1, unless prompt_logprobs are asked for")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        _check_grammar(self.grammar)
        object.__setattr__(self, "stop", _stop_texts(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the choice is the plain argmax."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InputError where a token id named here is not below vocab_size."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in ids:
                if token >= vocab_size:
                    raise InputError(f"{name} names token {token}, but the vocabulary has ids 0 to {vocab_size - 1}")


def _check_grammar(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"grammar must be a non-empty text, got {shown(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InputError(f"grammar is no valid Unicode text at character {error.start}") from error
    if size > MAX_GRAMMAR_BYTES:
        raise InputError(f"grammar may have at most {MAX_GRAMMAR_BYTES} bytes")


def _stop_texts(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise InputError(f"stop must be a text or a list of texts, got {shown(value)}")
    if len(value) > MAX_STOP_STRINGS:
        raise InputError(f"stop takes at most {MAX_STOP_STRINGS} texts, got {len(value)}")
    for text in value:
        if not isinstance(text, str) or not text:
            raise InputError(f"stop must hold non-empty texts, got {shown(text)}")
    return tuple(value)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InputError(f"stop_token_ids must be a list of token ids, got {shown(value)}")
    for token in value:
        check_integer("each of stop_token_ids", token, 0, MAX_INT32)
    return tuple(value)


def _logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"logit_bias must map token ids to numbers, got {shown(value)}")
    for token, bias in value.items():
        check_integer("each key of logit_bias", token, 0, MAX_INT32)
        check_number(f"logit_bias of token {token}", bias, -100, 100)
    return dict(value)
