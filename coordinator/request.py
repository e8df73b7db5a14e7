"""One request as the coordinator knows it, and what is refused at the door."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

from paceline.coordinator.block_manager import BlockTable
from paceline.coordinator.constraints import Constraint
from paceline.coordinator.errors import InputError
from paceline.coordinator.messages import RowSampling, TokenLogprobs
from paceline.coordinator.sampling_params import SamplingParams


class Status(Enum):
    """Where a request is."""

    WAITING = auto()
    """New, or preempted: holds neither slot nor blocks."""
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A request's tokens and how far they are computed.

    Counts run ahead of values: `num_computed` includes the steps in flight, and `num_known` the tokens that they will
    sample, whose values are not in `token_ids` yet.
    """

    id: str
    token_ids: array[int]
    """Prompt and output as far as their values are known; int32, as they travel to the ranks and are hashed."""
    prompt_len: int
    max_len: int
    """The answer ends when prompt and output together have this many tokens."""
    sampling: RowSampling
    stop_ids: frozenset[int]
    rank: tuple[int, int]
    """(priority, order of arrival): the lowest is served first, the highest is preempted first."""
    table: BlockTable
    arrived: float
    """Seconds on the coordinator's clock, as all times here."""
    num_known: int
    end_ids_to_avoid: tuple[int, ...] = ()
    """The model's end ids, where a grammar would allow them and ignore_eos does not."""
    constraint: Constraint | None = None
    """Its place in its grammar, where it has one, from when that is compiled."""
    status: Status = Status.WAITING
    slot: int = -1
    num_computed: int = 0
    is_scored: bool = False
    """Whether the ranks give the log-probabilities of its prompt while it holds its slot."""
    num_scored: int = 0
    """How many of these the steps made so far give."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """As far as they are known."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    first_scheduled: float | None = None
    first_token: float | None = None

    @property
    def num_pending(self) -> int:
        """Known tokens that a step may compute now. The very last token of an answer never needs to be computed.

        What a grammar allows next is known only once the last token is: until then there is nothing to do.
        """
        if self.constraint is not None and self.awaits_tokens:
            return 0
        known = self.num_known if self.num_known < self.max_len else self.max_len - 1
        return known - self.num_computed

    @property
    def awaits_tokens(self) -> bool:
        """Whether steps in flight sample tokens for it."""
        return self.num_known > len(self.token_ids)

    @property
    def wants_scores(self) -> bool:
        """Whether steps must still compute its prompt for the log-probabilities of its tokens."""
        return self.sampling.prompt_logprobs >= 0 and self.num_scored < self.prompt_len - 1

    @property
    def ends_with_its_prompt(self) -> bool:
        """Whether it is there for its prompt alone."""
        return self.max_len == self.prompt_len

    @property
    def barred_ids(self) -> tuple[int, ...]:
        """Ids that its next token must not be, whatever its grammar allows."""
        is_short = len(self.token_ids) - self.prompt_len < self.sampling.min_tokens
        return (*self.end_ids_to_avoid, *(self.sampling.stop_ids if is_short else ()))

    def finish_reason(self) -> str | None:
        """Why the answer ends with its latest token, or None where it goes on; the ranks see to min_tokens."""
        if self.token_ids[-1] in self.stop_ids:
            return "stop"
        if len(self.token_ids) >= self.max_len:
            return "length"
        return None if self.constraint is None else self.constraint.finish_reason


def resolve_stop_ids(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The token ids that end an answer, each once; InputError where one is outside the vocabulary."""
    params.check_vocabulary(vocab_size)
    for token in eos_token_ids:
        if not 0 <= token < vocab_size:
            raise InputError(f"eos_token_ids names token {token}, but the vocabulary has ids 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))))


def resolve_sampling(params: SamplingParams, stop_ids: tuple[int, ...]) -> RowSampling:
    """The rules of one slot; a request without a seed gets an unpredictable one."""
    seed = params.seed
    if seed is None:
        seed = int.from_bytes(secrets.token_bytes(8), "little", signed=True)
    return RowSampling(
        temperature=0.0 if params.greedy else float(params.temperature),
        seed=seed,
        top_k=max(params.top_k, 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias=tuple((token, float(bias)) for token, bias in params.logit_bias.items()),
        min_tokens=params.min_tokens,
        stop_ids=stop_ids,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_len: int, setting: str) -> array[int]:
    """The prompt's ids as int32; InputError where it is empty, leaves no room below max_len, or holds what is no id.

    setting: the name of what sets max_len, for the message.
    """
    if not token_ids:
        raise InputError("the prompt is empty: give at least one token")
    if len(token_ids) >= max_len:
        raise InputError(
            f"the prompt has {len(token_ids)} tokens, "
            f"but {setting} allows at most {max_len} in prompt and answer together"
        )
    # The device waits for this: no prompt of a call runs before all have been looked at.
    ids = token_ids if isinstance(token_ids, (list, tuple)) else list(token_ids)  # `array` reads bytes four at a time
    if list(map(type, ids)).count(int) == len(ids) and max(ids) < vocab_size:
        with suppress(OverflowError):  # of a negative id
            return array("i", array("I", ids).tobytes())
    position, token = next(
        (position, token) for position, token in enumerate(ids) if type(token) is not int or not 0 <= token < vocab_size
    )
    raise InputError(
        f"the prompt's token at position {position} is {token!r}, "
        f"but token ids are whole numbers from 0 to {vocab_size - 1}"
    )
