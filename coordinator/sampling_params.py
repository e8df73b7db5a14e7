"""How the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.coordinator.errors import InputError

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request; names and meanings follow vLLM's and OpenAI's.

    Every value is checked on construction; a bad one raises InputError naming the field.
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
    """Most tokens to generate; None generates until the model's length."""
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
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("n", "top_k", "min_tokens"):
            self._check_int(name)
        for name in ("seed", "max_tokens", "logprobs"):
            if getattr(self, name) is not None:
                self._check_int(name)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InputError(f"{name} must be a finite number, got {value!r}")
        self._require(1 <= self.n <= MAX_CHOICES, f"n must be from 1 to {MAX_CHOICES}, got {self.n}")
        self._require(0 <= self.temperature <= 100, f"temperature must be from 0 to 100, got {self.temperature}")
        self._require(0 <= self.top_p <= 1, f"top_p must be from 0 to 1, got {self.top_p}")
        self._require(-1 <= self.top_k < 2**31, f"top_k must be from -1 to 2^31-1, got {self.top_k}")
        self._require(0 <= self.min_p <= 1, f"min_p must be from 0 to 1, got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(-2 <= getattr(self, name) <= 2, f"{name} must be from -2 to 2, got {getattr(self, name)}")
        self._require(
            0 < self.repetition_penalty <= 100,
            f"repetition_penalty must be above 0 and at most 100, got {self.repetition_penalty}",
        )
        self._require(self.seed is None or -(2**63) <= self.seed < 2**63, f"seed must fit in 64 bits, got {self.seed}")
        self._require(
            self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"
        )
        self._require(self.min_tokens >= 0, f"min_tokens must not be negative, got {self.min_tokens}")
        self._require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
        )
        self._require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"logprobs must be from 0 to {MAX_LOGPROBS}, got {self.logprobs}",
        )
        self._require(
            len(self.stop) <= MAX_STOP_STRINGS, f"stop takes at most {MAX_STOP_STRINGS} texts, got {len(self.stop)}"
        )
        for text in self.stop:
            self._require(isinstance(text, str) and text != "", f"stop must hold non-empty texts, got {text!r}")
        for token in self.stop_token_ids:
            self._require(is_int(token) and token >= 0, f"stop_token_ids must hold token ids, got {token!r}")
        for token, bias in self.logit_bias.items():
            self._require(is_int(token) and token >= 0, f"logit_bias must be keyed by token ids, got {token!r}")
            self._require(
                not isinstance(bias, bool) and isinstance(bias, (int, float)) and -100 <= bias <= 100,
                f"logit_bias of token {token} must be from -100 to 100, got {bias!r}",
            )

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

    def _check_int(self, name: str) -> None:
        value = getattr(self, name)
        self._require(is_int(value), f"{name} must be a whole number, got {value!r}")

    @staticmethod
    def _require(condition: bool, message: str) -> None:
        if not condition:
            raise InputError(message)


def is_int(value: object) -> bool:
    """Whether value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
