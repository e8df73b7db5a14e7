"""Choosing the next token of each sampling row from vocabulary-sharded logits.

Every choice is one formula, argmax over the vocabulary of logit + temperature * Gumbel noise (temperature 0 is plain
argmax), computed on each rank's shard and joined by one maximum over ranks. The noise is a function of (request seed,
position, token id) alone, so a seeded request gives the same tokens in any batch, at any number of ranks, and after
preemption. Rows that ask for more (penalties, bias, filters, log-probabilities) are brought into that form first,
each transformation touching only the rows that ask for it.

Order: repetition penalty, frequency and presence penalties, logit bias, ids held back by min_tokens, then temperature
with top-k, top-p and min-p.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.coordinator.messages import RowSampling
from paceline.kernels.gumbel_argmax import gumbel_argmax, token_ids_of
from paceline.kernels.top_k_top_p import filter_logits
from paceline.model.communicator import Communicator
from paceline.model.shard_plan import Span
from paceline.worker.batch_state import BatchState, DeviceRows


@dataclass(frozen=True)
class SampledLogprobs:
    """Log-probabilities of the rows that asked, on the device."""

    rows: list[int]
    """Indices among the sampling rows."""
    chosen: torch.Tensor
    """[n] float32."""
    top_ids: torch.Tensor
    """[n, k] int64, best first; k is the most that any of them asked for."""
    top: torch.Tensor
    """[n, k] float32."""


class Sampler:
    """Samples for one rank, whose logits cover global ids vocab.start on; columns past vocab.length are padding."""

    def __init__(self, state: BatchState, communicator: Communicator, vocab: Span, vocab_size: int) -> None:
        self._state = state
        self._communicator = communicator
        self._vocab = vocab
        self._vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, rows: DeviceRows) -> tuple[torch.Tensor, SampledLogprobs | None]:
        """Token ids [S] int64, equal on every rank, of local logits [S, padded shard width] of any float type."""
        slots = rows.sampled_slot_list
        settings = [self._state.sampling[slot] for slot in slots]
        model_logits = None
        wanted = _rows_where(settings, lambda s: s.logprobs >= 0)
        if wanted:
            model_logits = self._gather(logits[wanted].float())
        logits = self._adjust(logits, slots, settings)
        logits = self._filter(logits, slots, settings)
        keys = gumbel_argmax(
            logits,
            self._state.temperature[rows.sampled_slots],
            self._state.seeds[rows.sampled_slots],
            self._state.known_lens[rows.sampled_slots],
            self._vocab.start,
            self._vocab.length,
        )
        token_ids = token_ids_of(self._communicator.all_reduce_max(keys))
        if model_logits is None:
            return token_ids, None
        return token_ids, _logprobs(model_logits, token_ids, wanted, max(settings[row].logprobs for row in wanted))

    def _adjust(self, logits: torch.Tensor, slots: tuple[int, ...], settings: list[RowSampling]) -> torch.Tensor:
        """Apply penalties, bias and held-back ids to the rows that have them."""
        penalised = _rows_where(settings, _has_penalty)
        biased = _rows_where(settings, lambda s: bool(s.logit_bias))
        held_back = [
            row
            for row, (slot, s) in enumerate(zip(slots, settings, strict=True))
            if self._state.host_known[slot] - self._state.prompt_lens[slot] < s.min_tokens and s.stop_ids
        ]
        if not (penalised or biased or held_back):
            return logits
        logits = logits.float()
        if penalised:
            logits[penalised] = self._penalise(
                logits[penalised], [slots[row] for row in penalised], [settings[row] for row in penalised]
            )
        for row in biased:
            ids, values = zip(*settings[row].logit_bias, strict=True)
            columns, kept = self._local_columns(ids)
            logits[row, columns] += torch.tensor([values[i] for i in kept], device=logits.device)
        for row in held_back:
            columns, _ = self._local_columns(settings[row].stop_ids)
            logits[row, columns] = float("-inf")
        return logits

    def _penalise(self, logits: torch.Tensor, slots: list[int], settings: list[RowSampling]) -> torch.Tensor:
        """Penalties of logits [n, W] from each slot's tokens so far, counted afresh from the token table.

        No count is kept between steps, so preemption and prefix hits cannot make one stale.
        """
        device = logits.device
        known = [self._state.host_known[slot] for slot in slots]
        prompt = [self._state.prompt_lens[slot] for slot in slots]
        tokens = self._state.token_table[slots, : max(known)].long()
        place = torch.arange(tokens.shape[1], device=device)
        in_history = place < torch.tensor(known, device=device)[:, None]
        in_output = in_history & (place >= torch.tensor(prompt, device=device)[:, None])
        columns = tokens - self._vocab.start
        dump = logits.shape[1]  # one more column takes what lies outside this shard or past the history
        local = (columns >= 0) & (columns < self._vocab.length)

        def count(mask: torch.Tensor) -> torch.Tensor:
            index = torch.where(mask & local, columns, dump)
            zeros = torch.zeros(logits.shape[0], dump + 1, device=device)
            return zeros.scatter_add_(1, index, torch.ones_like(index, dtype=torch.float32))[:, :dump]

        def column(name: str) -> torch.Tensor:
            return torch.tensor([getattr(s, name) for s in settings], dtype=torch.float32, device=device)[:, None]

        repetition = column("repetition_penalty")
        seen = count(in_history) > 0
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        output_counts = count(in_output)
        return logits - column("frequency_penalty") * output_counts - column("presence_penalty") * (output_counts > 0)

    def _filter(self, logits: torch.Tensor, slots: tuple[int, ...], settings: list[RowSampling]) -> torch.Tensor:
        """Apply top-k, top-p and min-p to the rows that have them; they need the whole vocabulary on each rank."""
        filtered = _rows_where(
            settings, lambda s: s.temperature > 0 and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)
        )
        if not filtered:
            return logits
        chosen = [settings[row] for row in filtered]
        device, width = logits.device, logits.shape[1]
        whole = filter_logits(
            self._gather(logits[filtered].float()),
            self._state.temperature[[slots[row] for row in filtered]],
            torch.tensor([s.top_k for s in chosen], dtype=torch.int32, device=device),
            torch.tensor([s.top_p for s in chosen], device=device),
            torch.tensor([s.min_p for s in chosen], device=device),
        )
        mine = whole[:, self._vocab.start : self._vocab.start + self._vocab.length]
        logits = logits.float()
        logits[filtered] = torch.nn.functional.pad(mine, (0, width - mine.shape[1]), value=float("-inf"))
        return logits

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        """The whole vocabulary's logits [n, vocab_size] of local ones [n, W]; every rank's shard starts at rank * W."""
        return self._communicator.all_gather(logits)[:, : self._vocab_size]

    def _local_columns(self, token_ids: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """This shard's columns of the ids that lie in it, and their indices among token_ids."""
        kept = [i for i, token in enumerate(token_ids) if 0 <= token - self._vocab.start < self._vocab.length]
        return [token_ids[i] - self._vocab.start for i in kept], kept


def _rows_where(settings: list[RowSampling], condition: Callable[[RowSampling], bool]) -> list[int]:
    return [row for row, setting in enumerate(settings) if condition(setting)]


def _has_penalty(setting: RowSampling) -> bool:
    return setting.repetition_penalty != 1.0 or setting.presence_penalty != 0.0 or setting.frequency_penalty != 0.0


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, rows: list[int], top: int) -> SampledLogprobs:
    """Log-probabilities from whole-vocabulary logits [n, V] of the sampling rows `rows`."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[rows][:, None])[:, 0]
    values, ids = logprobs.topk(top, dim=-1)
    return SampledLogprobs(rows, chosen, ids, values)
