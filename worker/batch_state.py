"""What a rank remembers between steps: one row a slot, on the device, changed only by the plans' deltas.

Token ids sampled by a step are written into the token table on the device itself, so that the next step's inputs
need nothing from the host but which slots run. The host keeps counts alone (never values) in plain lists.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from paceline.coordinator.messages import Admission, RowSampling, StepPlan, StepRows
from paceline.kernels.advance_rows import advance_rows
from paceline.kernels.decode_work import plan_decode
from paceline.kernels.prepare_inputs import prepare_inputs
from paceline.model.context import KVCache, StepContext
from paceline.worker.state_memory import StateMemory
from paceline.worker.upload import float_bits, long_bits

GREEDY = RowSampling(temperature=0.0, seed=0)

_TOKENS, _BLOCKS, _INTS, _FLOATS, _SEEDS, _STEP = range(6)
"""The tensors of a state's memory, by their order there."""


@dataclass(frozen=True)
class StepShape:
    """What the launches of a step depend on; everything else about it is read on the device."""

    num_tokens: int
    num_rows: int
    has_prefills: bool
    """Whether a row may have more than one token."""
    has_decodes: bool = True
    """Whether a row may have exactly one token, as in all that have graphs."""


@dataclass(frozen=True)
class HostRows:
    """The rows of a step as the host knows them; kept while the rows stay the same."""

    rows: StepRows
    shape: StepShape
    sampled: tuple[int, ...]
    """Indices of the rows that sample."""
    sampling: tuple[RowSampling, ...]
    """The rules of every row; a row that does not sample has none of its own."""


class BatchState:
    """Token table, lengths, block tables and sampling state of every slot, and the rows of the step at hand."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.device = device
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        shapes = [(num_slots, max_model_len), (num_slots, max_blocks), (4, num_slots), (6, num_slots), (num_slots, 2)]
        self._memory = StateMemory([*shapes, (3 * num_slots + 1,)], device)
        self.token_table, self.block_tables, ints, floats, seeds, self._step = self._memory.tensors
        # One value a slot.
        self.computed_lens, self.known_lens, self.prompt_lens, self.top_k = ints.unbind()
        floats = floats.view(torch.float32)
        self.temperature, self.top_p, self.min_p = floats[:3].unbind()
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = floats[3:].unbind()
        self.seeds = seeds.view(torch.int64).view(num_slots)
        # The rows of a step always lie here, padded to the end, so that a CUDA graph finds them.
        self._slots: torch.Tensor
        self._slots, self._query_start, self._samples = self._step.split([num_slots, num_slots + 1, num_slots])
        self._pad_rows()
        self._prefill_counter = torch.zeros(1, dtype=torch.int32, device=device)
        # Host mirrors: counts are known without asking the device.
        self.host_known = [0] * num_slots
        self.host_computed = [0] * num_slots
        self.host_blocks = [0] * num_slots
        self.host_prompt = [0] * num_slots
        self.sampling: list[RowSampling] = [GREEDY] * num_slots
        self.ruled_slots: set[int] = set()
        """Those that may take more than a draw by temperature."""
        self.scored_slots: set[int] = set()
        """Those whose prompts are scored, until they are computed."""
        self._rows: HostRows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that its tensors take on the device."""
        return self._memory.nbytes + self._prefill_counter.nbytes

    @property
    def num_slots(self) -> int:
        """How many requests there is room for."""
        return len(self.sampling)

    def slots(self, num_rows: int) -> torch.Tensor:
        """Slots [R] int32 of the step's rows; -1 of those past its end."""
        return self._slots[:num_rows]

    def apply(self, plan: StepPlan) -> HostRows:
        """Take in the plan's delta; return the rows to run. Freed slots need no action: admission overwrites them."""
        for admission in plan.admissions:
            self._admit(admission)
        for slot, block_ids in plan.block_appends:
            self._write_blocks(slot, self.host_blocks[slot], block_ids)
        if plan.rows is not None:
            self._rows = self._write_rows(plan.rows)
        elif plan.admissions and self._rows is not None:
            # The rows are the same, the requests in their slots are not.
            self._rows = replace(self._rows, sampling=self._rules_of(self._rows.rows))
        if self._rows is None:
            raise ValueError(f"step {plan.step} repeats the rows of a previous step, but there was none")
        self._memory.store()
        return self._rows

    def compile_stores(self) -> None:
        """Within `compile_only`, compile what `apply` launches."""
        self._memory.compile_stores()

    def _admit(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        known = len(admission.token_ids)
        self._memory.write(_TOKENS, slot * self.token_table.shape[1], admission.token_ids)
        self._write_blocks(slot, 0, admission.block_ids)
        ints = admission.num_computed, known, admission.prompt_len, sampling.top_k
        floats = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self._memory.write_apart(_INTS, slot, self.num_slots, ints)
        self._memory.write_apart(_FLOATS, slot, self.num_slots, float_bits(floats))
        self._memory.write(_SEEDS, 2 * slot, long_bits(sampling.seed))
        self.host_known[slot] = known
        self.host_computed[slot] = admission.num_computed
        self.host_prompt[slot] = admission.prompt_len
        self.sampling[slot] = sampling
        has_rules = sampling.has_rules or sampling.has_filter or sampling.min_tokens > 0
        (self.ruled_slots.add if has_rules else self.ruled_slots.discard)(slot)
        (self.scored_slots.discard if sampling.prompt_logprobs < 0 else self.scored_slots.add)(slot)

    def _write_blocks(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        self._memory.write(_BLOCKS, slot * self.block_tables.shape[1] + first, block_ids)
        self.host_blocks[slot] = first + len(block_ids)

    def _rules_of(self, rows: StepRows) -> tuple[RowSampling, ...]:
        pairs = zip(rows.slots, rows.samples, strict=True)
        return tuple(self.sampling[slot] if samples else GREEDY for slot, samples in pairs)

    def _write_rows(self, rows: StepRows) -> HostRows:
        starts = array("i", accumulate(rows.counts, initial=0))
        padding = self.num_slots - len(rows.slots)
        slots = array("i", rows.slots) + array("i", [-1]) * padding
        samples = array("i", rows.samples) + array("i", [0]) * padding
        self._memory.write(_STEP, 0, slots + starts + starts[-1:] * padding + samples)
        return HostRows(
            rows=rows,
            shape=StepShape(starts[-1], len(rows.slots), max(rows.counts) > 1, 1 in rows.counts),
            sampled=tuple(index for index, samples in enumerate(rows.samples) if samples),
            sampling=self._rules_of(rows),
        )

    @contextmanager
    def without_rows(self) -> Iterator[None]:
        """Meanwhile every row is padding: a step that is run changes nothing."""
        rows = self._step.clone()
        self._pad_rows()
        yield
        self._step.copy_(rows)

    def _pad_rows(self) -> None:
        self._step.zero_()
        self._slots.fill_(-1)

    def inputs(self, shape: StepShape, kv_caches: Sequence[KVCache]) -> tuple[torch.Tensor, StepContext]:
        """The step's token ids [T] int64 and its context, built on the device from the tables.

        The shape may be larger than the step: what is past its end is padding.
        """
        slots = self._slots[: shape.num_rows]
        query_start = self._query_start[: shape.num_rows + 1]
        inputs = prepare_inputs(
            self.token_table,
            self.computed_lens,
            self.block_tables,
            slots,
            query_start,
            shape.num_tokens,
            self.block_size,
        )
        plans_decodes = self.device.type == "cuda" and shape.has_decodes
        context = StepContext(
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_start=query_start,
            seq_lens=inputs.seq_lens,
            block_tables=self.block_tables,
            row_slots=slots,
            logits_tokens=inputs.last_tokens if shape.has_prefills else None,
            kv_caches=kv_caches,
            has_prefills=shape.has_prefills,
            has_decodes=shape.has_decodes,
            decode_work=plan_decode(query_start, inputs.seq_lens, kv_caches[0][0].shape[2]) if plans_decodes else None,
            prefill_counter=self._prefill_counter,
        )
        return inputs.input_ids, context

    def advance(self, shape: StepShape, token_ids: torch.Tensor) -> None:
        """On the device, count the step's tokens as computed and append the ids [R] of the rows that sample."""
        advance_rows(
            token_ids,
            self._slots[: shape.num_rows],
            self._query_start[: shape.num_rows + 1],
            self._samples[: shape.num_rows],
            self.token_table,
            self.computed_lens,
            self.known_lens,
        )

    def count(self, rows: HostRows) -> None:
        """The same on the host, which knows how many tokens there are but not their ids."""
        for slot, count, samples in zip(rows.rows.slots, rows.rows.counts, rows.rows.samples, strict=True):
            self.host_computed[slot] += count
            self.host_known[slot] += samples
