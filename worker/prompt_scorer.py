"""How likely a prompt's own tokens were: log-probabilities at every position that a step computes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.coordinator.messages import StepRows
from paceline.model.communicator import Communicator
from paceline.model.decoder import Hidden
from paceline.worker.batch_state import BatchState
from paceline.worker.upload import upload_ints

POSITIONS_AT_ONCE = 128
"""Of which there are whole-vocabulary logits at a time, in float32: 80 MB of 150,000 ids."""


@dataclass(frozen=True)
class ScoredRow:
    """A row of a step whose tokens say how likely the prompt's next ones are."""

    slot: int
    start: int
    """Where the row begins among the step's tokens."""
    position: int
    """Of its first token in its prompt."""
    number: int
    """How many of its tokens have a next one in the prompt."""
    top: int
    """How many of the most likely ids are wanted beside."""


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of n tokens of prompts, on the device."""

    rows: Sequence[ScoredRow]
    """In whose order they are."""
    chosen: torch.Tensor
    """[n] float32."""
    ranks: torch.Tensor
    """[n] int64: 1 where the token was the likeliest."""
    top_ids: torch.Tensor
    """[n, k] int64, best first; k is the most that any of the rows asks for."""
    top: torch.Tensor
    """[n, k] float32."""


class PromptScorer:
    """Scores prompts on one rank, whose logits are a part of the vocabulary's."""

    def __init__(
        self,
        state: BatchState,
        communicator: Communicator,
        logits_of: Callable[..., torch.Tensor],
        vocab_size: int,
    ) -> None:
        """logits_of: the model's `logits`."""
        self._state = state
        self._communicator = communicator
        self._logits_of = logits_of
        self._vocab_size = vocab_size

    def rows_of(self, rows: StepRows) -> list[ScoredRow]:
        """The rows of the step at hand, not yet counted, that ask for scores."""
        state = self._state
        if not state.scored_slots:
            return []
        scored = []
        start = 0
        for slot, count in zip(rows.slots, rows.counts, strict=True):
            if slot in state.scored_slots:
                position = state.host_computed[slot]
                number = min(count, state.host_prompt[slot] - 1 - position)
                if number > 0:
                    scored.append(ScoredRow(slot, start, position, number, state.sampling[slot].prompt_logprobs))
                else:
                    state.scored_slots.remove(slot)
            start += count
        return scored

    def score(self, hidden: Hidden, rows: Sequence[ScoredRow], *, report: bool) -> PromptScores | None:
        """Scores of these rows, of what all tokens of the step come to; None where nobody is to have them.

        Ranks may differ in report: the collectives are the same.
        """
        places, slots, positions = upload_ints(
            [
                [row.start + i for row in rows for i in range(row.number)],
                [row.slot for row in rows for _ in range(row.number)],
                [row.position + 1 + i for row in rows for i in range(row.number)],
            ],
            self._state.device,
        )
        targets = self._state.token_table[slots.long(), positions.long()].long()
        top = min(max(row.top for row in rows), self._vocab_size)
        parts = []
        for place, target in zip(places.split(POSITIONS_AT_ONCE), targets.split(POSITIONS_AT_ONCE), strict=True):
            logits = self._logits_of(*(None if part is None else part.index_select(0, place) for part in hidden))
            whole = self._communicator.all_gather(logits.float())[:, : self._vocab_size]
            if report:
                parts.append(_score(whole, target, top))
        if not report:
            return None
        return PromptScores(rows, *(torch.cat(each) for each in zip(*parts, strict=True)))


def _score(logits: torch.Tensor, targets: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    """Fields of PromptScores for logits [n, V] and the tokens [n] that came next."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, targets[:, None])
    ranks = (logprobs > chosen).sum(dim=1) + 1
    values, ids = logprobs.topk(top, dim=-1)
    return chosen[:, 0], ranks, ids, values
