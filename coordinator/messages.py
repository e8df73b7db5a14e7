"""What the coordinator tells the ranks each step, and what comes back.

A StepPlan is a delta: the ranks keep everything said before (token table, lengths, block tables, sampling state) in
one row a slot, so that a steady decode step says almost nothing. Within a plan the order of effect is: freed slots,
admissions, appended blocks, then the rows run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling rules of one slot, resolved: greedy is temperature 0, and every request has a seed."""

    temperature: float
    seed: int
    """64-bit signed key of the request's noise."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit) pairs."""
    min_tokens: int = 0
    """While the output is shorter than this, stop_ids are not chosen."""
    stop_ids: tuple[int, ...] = ()
    """The ids that min_tokens holds back."""
    logprobs: int = -1
    """-1: none wanted; k: the chosen token's and the k most likely tokens' log-probabilities."""
    prompt_logprobs: int = -1
    """The same of each token of the prompt but the first, as steps compute the tokens before them."""

    @property
    def has_penalty(self) -> bool:
        """Whether what was said before counts."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_filter(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_rules(self) -> bool:
        """Whether every token takes more than filters and a draw; what min_tokens asks comes to an end."""
        return self.has_penalty or bool(self.logit_bias) or self.logprobs >= 0


@dataclass(frozen=True, slots=True)
class Admission:
    """A request enters a slot, for the first time or again after preemption."""

    slot: int
    token_ids: Sequence[int]
    """All its known tokens: prompt, and what was generated before a preemption."""
    prompt_len: int
    """How many of token_ids are the prompt proper."""
    num_computed: int
    """How many leading tokens already have their keys and values in block_ids (a prefix hit)."""
    block_ids: Sequence[int]
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, parallel sequences; rows of one token come first, so that decode is a leading run."""

    slots: Sequence[int]
    counts: Sequence[int]
    """Tokens to compute, from the slot's first uncomputed one on."""
    samples: Sequence[bool]
    """Whether the row reaches the end of its known tokens, so that a new one is sampled."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Plans are numbered from 0 without gaps."""

    step: int
    freed: Sequence[int] = ()
    """Slots whose requests left. An admission overwrites all of its slot, so no rank has to read this: it is sent so
    that ranks may drop what they keep for a slot, and the tests check by it that none is given away while in use."""
    admissions: Sequence[Admission] = ()
    block_appends: Sequence[tuple[int, Sequence[int]]] = ()
    """(slot, block ids appended to its block table)."""
    rows: StepRows | None = None
    """None: the previous step's rows again."""
    masks: Sequence[tuple[int, bytes]] = ()
    """(slot, which ids it may sample) of the rows that sample by a grammar, for this step alone: a bit a token id, from
    the lowest bit of the first byte on, in whole 32-bit words."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The last message on a channel: ranks end, with exit status 0 where error is empty."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one token under the model itself: before penalties, bias and temperature."""

    chosen: float
    top_ids: Sequence[int] = ()
    """The most likely ids, best first."""
    top: Sequence[float] = ()
    rank: int = 0
    """Of a prompt's token: 1 is the likeliest. 0 where nobody counted."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, one entry per row whose `samples` was true, in row order."""

    step: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None] = field(default=())
    """Empty where no row asked; else parallel to token_ids."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Of the prompts' tokens that follow on the computed ones, in the rows that ask for them, in row order."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model and the measured memory allow; agreed by all ranks before the first step."""

    vocab_size: int
    max_model_len: int
    """Most tokens of one request, prompt and output together."""
    num_blocks: int
    """Blocks of the cache on every rank."""
