"""Choosing the next token of each sampling row from vocabulary-sharded logits.

Every choice is one formula, argmax over the vocabulary of logit + temperature * Gumbel noise (temperature 0 is plain
argmax), computed on each rank's shard and joined by one maximum over ranks. The noise is a function of (request seed,
position, token id) alone, so a seeded request gives the same tokens in any batch, at any number of ranks, and after
preemption. Rows that ask for more (penalties, bias, filters, log-probabilities) are brought into that form first,
each transformation touching only the rows that ask for it. Which rows ask for what is uploaded once for as long as the
rows stay the same, and no step waits for the device.

Order: masks of grammars, repetition penalty, frequency and presence penalties, logit bias, ids held back by min_tokens,
then temperature with top-k, top-p and min-p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from paceline.coordinator.messages import RowSampling
from paceline.kernels.gumbel_argmax import gumbel_argmax, token_ids_of
from paceline.kernels.top_k_top_p import find_cutoffs
from paceline.model.communicator import Communicator
from paceline.model.shard_plan import Span
from paceline.worker.batch_state import BatchState, HostRows
from paceline.worker.token_masks import mask_logits
from paceline.worker.upload import float_bits, upload_ints


class Asked(Enum):
    """The most that a row of a step asks for."""

    DRAW = 0
    """By temperature, with noise or without."""
    FILTERS = 1
    """A draw among what top-k, top-p and min-p leave."""
    RULES = 2
    """More than that, which `Sampler.sample` alone does."""


@dataclass(frozen=True)
class SampledLogprobs:
    """Log-probabilities of the rows that asked, on the device."""

    rows: list[int]
    """Indices among the step's rows."""
    chosen: torch.Tensor
    """[n] float32."""
    top_ids: torch.Tensor
    """[n, k] int64, best first; k is the most that any of them asked for."""
    top: torch.Tensor
    """[n, k] float32."""


@dataclass(frozen=True)
class _Group:
    """The rows that ask for one thing."""

    rows: list[int]
    """Indices among the step's rows."""
    index: torch.Tensor
    """The same on the device, [n] int64."""
    slots: torch.Tensor
    """[n] int32."""


@dataclass(frozen=True)
class _Entries:
    """Single logits of this rank's shard, and a value for each."""

    rows: torch.Tensor
    """[n] int64, indices among the step's rows."""
    columns: torch.Tensor
    """[n] int64."""
    values: torch.Tensor
    """[n]."""


@dataclass(frozen=True)
class _RuledRows:
    """Which of a step's rows ask for what; kept while the rows stay the same."""

    adjusted: bool
    """Whether a row asks for penalties, bias or held-back ids, be their columns of this rank or of another."""
    penalised: _Group
    biases: _Entries
    """float32 values to add."""
    held_back: _Entries
    """Stop ids that are not chosen while a row knows fewer tokens than the int32 value."""
    filtered: _Group
    reported: _Group
    most_logprobs: int
    """How many top log-probabilities the reported rows need."""


class Sampler:
    """Samples for one rank, whose logits cover global ids vocab.start on; columns past vocab.length are padding."""

    def __init__(self, state: BatchState, communicator: Communicator, vocab: Span, vocab_size: int) -> None:
        self._state = state
        self._communicator = communicator
        self._vocab = vocab
        self._vocab_size = vocab_size
        self._arrivals = torch.zeros(state.num_slots, dtype=torch.int32, device=state.device)
        self._no_cutoffs = torch.full((state.num_slots,), float("-inf"), device=state.device)
        self._rows: HostRows | None = None
        self._asked = Asked.DRAW
        self._ruled: _RuledRows | None = None

    def asked(self, rows: HostRows) -> Asked:
        """What the step's rows ask for; the same on every rank."""
        self._see(rows)
        return self._asked

    def choose(self, logits: torch.Tensor, cutoffs: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids [R] int64, equal on every rank, of the step's rows; logits are local, [R, padded shard width].

        cutoffs: [R] float32, the least logit that may be drawn of each row; without them any may, and this depends on
        nothing that the host knows of the rows, so that a CUDA graph can hold it.
        """
        drawn = self.draw(logits, cutoffs)
        if self._communicator.size == 1:
            return drawn
        return token_ids_of(self._communicator.all_reduce_max(drawn))

    def choose_filtered(self, logits: torch.Tensor) -> torch.Tensor:
        """`choose` with the cutoffs of all rows, which a CUDA graph can hold too; every rank needs the whole logits."""
        return self.choose(logits, self._find_cutoffs(logits))

    def draw(self, logits: torch.Tensor, cutoffs: torch.Tensor | None = None) -> torch.Tensor:
        """Keys [R] int64 of the best ids of this rank's shard, of which `choose` takes the maximum over ranks.

        Of a rank alone these are the ids themselves.
        """
        state = self._state
        return gumbel_argmax(
            logits,
            state.temperature,
            state.seeds,
            state.known_lens,
            state.slots(logits.shape[0]),
            self._vocab.start,
            self._vocab.length,
            self._no_cutoffs if cutoffs is None else cutoffs,
            self._arrivals,
            as_token_ids=self._communicator.size == 1,
        )

    def sample(
        self, logits: torch.Tensor, rows: HostRows, masks: Sequence[tuple[int, bytes]] = (), *, report: bool = True
    ) -> tuple[torch.Tensor, SampledLogprobs | None]:
        """Token ids as `choose` gives them, by each row's rules and the step's masks; logits may be overwritten.

        With report come the log-probabilities of the rows that ask for them, None where no row does. Ranks may differ
        in report: the collectives are the same.
        """
        ruled = self._ruled_rows(rows)
        model_logits = None
        if ruled.reported.rows:
            gathered = self._gather(logits.index_select(0, ruled.reported.index).float())
            model_logits = gathered if report else None
        if masks:
            # Before all else: from minus infinity no rule comes back.
            mask_logits(logits, rows.rows, masks, self._vocab)
        logits = self._adjust(logits, rows, ruled)
        cutoffs = self._find_cutoffs(logits, ruled.filtered) if ruled.filtered.rows else None
        token_ids = self.choose(logits, cutoffs)
        if model_logits is None:
            return token_ids, None
        return token_ids, _logprobs(model_logits, token_ids, ruled.reported, ruled.most_logprobs)

    def _see(self, rows: HostRows) -> None:
        """Take note of a step's rows, where they are not those of the step before."""
        if self._rows is not rows:
            self._rows, self._ruled = rows, None
            self._asked = self._most_asked(rows)

    def _most_asked(self, rows: HostRows) -> Asked:
        num_filtered = 0
        for slot, rule in zip(rows.rows.slots, rows.sampling, strict=True):
            if slot in self._state.ruled_slots:
                if rule.has_rules or self._holds_back(slot, rule):
                    return Asked.RULES
                num_filtered += rule.has_filter
        if num_filtered == 0:
            return Asked.DRAW
        # Of several ranks `choose_filtered` gathers the logits of all rows, `sample` of those alone that filter.
        gathers_in_vain = self._communicator.size > 1 and 2 * num_filtered < len(rows.sampling)
        return Asked.RULES if gathers_in_vain else Asked.FILTERS

    def _ruled_rows(self, rows: HostRows) -> _RuledRows:
        self._see(rows)
        if self._ruled is None:
            self._ruled = self._upload_rules(rows)
        return self._ruled

    def _upload_rules(self, rows: HostRows) -> _RuledRows:
        """Find out what each row asks for, and send it to the device in one transfer."""
        rules = rows.sampling
        groups = [
            _rows_where(rules, lambda s: s.has_penalty),
            _rows_where(rules, lambda s: s.has_filter),
            _rows_where(rules, lambda s: s.logprobs >= 0),
        ]
        biases = [
            (row, column, rule.logit_bias[i][1])
            for row, rule in enumerate(rules)
            for i, column in self._local_columns([token for token, _ in rule.logit_bias])
        ]
        held_back = [
            (row, column, self._held_until(slot, rule))
            for row, (slot, rule) in enumerate(zip(rows.rows.slots, rules, strict=True))
            if self._holds_back(slot, rule)
            for _, column in self._local_columns(rule.stop_ids)
        ]
        *indices, bias_rows, bias_columns, bias_bits, held_rows, held_columns, held_until = upload_ints(
            [
                *groups,
                [row for row, _, _ in biases],
                [column for _, column, _ in biases],
                float_bits([value for _, _, value in biases]),
                [row for row, _, _ in held_back],
                [column for _, column, _ in held_back],
                [until for _, _, until in held_back],
            ],
            self._state.device,
        )
        slots = self._state.slots(len(rules))
        penalised, filtered, reported = (
            _Group(group, index.long(), slots[index.long()]) for group, index in zip(groups, indices, strict=True)
        )
        return _RuledRows(
            adjusted=any(
                rule.has_penalty or rule.logit_bias or self._holds_back(slot, rule)
                for slot, rule in zip(rows.rows.slots, rules, strict=True)
            ),
            penalised=penalised,
            biases=_Entries(bias_rows.long(), bias_columns.long(), bias_bits.view(torch.float32)),
            held_back=_Entries(held_rows.long(), held_columns.long(), held_until),
            filtered=filtered,
            reported=reported,
            most_logprobs=max((rule.logprobs for rule in rules), default=0),
        )

    def _holds_back(self, slot: int, rule: RowSampling) -> bool:
        return bool(rule.stop_ids) and self._state.host_known[slot] < self._held_until(slot, rule)

    def _held_until(self, slot: int, rule: RowSampling) -> int:
        """How many tokens the slot must know before its stop ids may be chosen; no answer outgrows the token table."""
        return min(self._state.host_prompt[slot] + rule.min_tokens, self._state.token_table.shape[1])

    def _local_columns(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """(index among token_ids, column of this shard) of the ids that lie in it."""
        columns = ((i, token - self._vocab.start) for i, token in enumerate(token_ids))
        return [(i, column) for i, column in columns if 0 <= column < self._vocab.length]

    def _adjust(self, logits: torch.Tensor, rows: HostRows, ruled: _RuledRows) -> torch.Tensor:
        """Apply penalties, bias and held-back ids to the rows that have them; if any has, all ranks have float32."""
        penalised, biases, held_back = ruled.penalised, ruled.biases, ruled.held_back
        if not ruled.adjusted:
            return logits
        logits = logits.float()
        if penalised.rows:
            longest = max(self._state.host_known[rows.rows.slots[row]] for row in penalised.rows)
            chosen = self._penalise(logits.index_select(0, penalised.index), penalised.slots, longest)
            logits.index_copy_(0, penalised.index, chosen)
        if biases.rows.numel():
            logits[biases.rows, biases.columns] += biases.values
        if held_back.rows.numel():
            # Filled by a mask: a number assigned by index would be copied to the device, which waits for it.
            known_lens = self._state.known_lens[self._state.slots(logits.shape[0])[held_back.rows]]
            held = known_lens < held_back.values
            kept = logits[held_back.rows, held_back.columns].masked_fill_(held, float("-inf"))
            logits[held_back.rows, held_back.columns] = kept
        return logits

    def _penalise(self, logits: torch.Tensor, slots: torch.Tensor, longest: int) -> torch.Tensor:
        """Penalties of logits [n, W] from each slot's tokens so far, of which none has more than longest.

        They are counted afresh from the token table: no count is kept between steps, so preemption and prefix hits
        cannot make one stale.
        """
        state, device = self._state, logits.device
        tokens = state.token_table[:, :longest].index_select(0, slots).long()
        place = torch.arange(longest, device=device)
        in_history = place < state.known_lens[slots][:, None]
        in_output = in_history & (place >= state.prompt_lens[slots][:, None])
        columns = tokens - self._vocab.start
        dump = logits.shape[1]  # one more column takes what lies outside this shard or past the history
        local = (columns >= 0) & (columns < self._vocab.length)

        def count(mask: torch.Tensor) -> torch.Tensor:
            index = columns.masked_fill(~(mask & local), dump)
            zeros = torch.zeros(logits.shape[0], dump + 1, device=device)
            return zeros.scatter_add_(1, index, torch.ones_like(index, dtype=torch.float32))[:, :dump]

        repetition = state.repetition_penalty[slots][:, None]
        frequency = state.frequency_penalty[slots][:, None]
        presence = state.presence_penalty[slots][:, None]
        seen = count(in_history) > 0
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        output_counts = count(in_output)
        return logits - frequency * output_counts - presence * (output_counts > 0)

    def _find_cutoffs(self, logits: torch.Tensor, filtered: _Group | None = None) -> torch.Tensor:
        """Of each row [R] the least logit that top-k, top-p and min-p keep.

        They need the whole vocabulary, which several ranks gather: of the filtered rows, where these are given.
        """
        state, num_rows = self._state, logits.shape[0]
        settings = state.temperature, state.top_k, state.top_p, state.min_p
        if filtered is None or self._communicator.size == 1:
            return find_cutoffs(self._gather(logits), state.slots(num_rows), *settings)
        found = find_cutoffs(self._gather(logits.index_select(0, filtered.index)), filtered.slots, *settings)
        return self._no_cutoffs[:num_rows].clone().index_copy_(0, filtered.index, found)

    def compile_rules(self, num_rows: int, dtype: torch.dtype) -> None:
        """Within `compile_only`: compile what so many rows launch where any has rules; dtype: of the model's logits.

        Penalties and biases make logits float32.
        """
        for each in (dtype, torch.float32):
            logits = torch.empty((num_rows, self._vocab.padded), dtype=each, device=self._state.device)
            self.draw(logits, self._find_cutoffs(logits))

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        """The whole vocabulary's logits [n, vocab_size] of local ones [n, W]; every rank's shard starts at rank * W."""
        return self._communicator.all_gather(logits)[:, : self._vocab_size]


def _rows_where(rules: Sequence[RowSampling], condition: Callable[[RowSampling], bool]) -> list[int]:
    return [row for row, rule in enumerate(rules) if condition(rule)]


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, reported: _Group, top: int) -> SampledLogprobs:
    """Log-probabilities of the reported rows from their whole-vocabulary logits [n, V]."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[reported.index][:, None])[:, 0]
    values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    return SampledLogprobs(reported.rows, chosen, ids, values)
