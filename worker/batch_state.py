"""What a rank remembers between steps: one row a slot, on the device, changed only by the plans' deltas.

Token ids sampled by a step are written into the token table on the device itself, so that the next step's inputs
need nothing from the host but which slots run. The host keeps counts alone (never values) in plain lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from paceline.coordinator.messages import Admission, RowSampling, StepPlan, StepRows
from paceline.kernels.advance_rows import advance_rows
from paceline.kernels.decode_work import plan_decode
from paceline.kernels.prepare_inputs import prepare_inputs
from paceline.model.context import KVCache, StepContext
from paceline.worker.upload import float_bits, long_bits, upload_ints

GREEDY = RowSampling(temperature=0.0, seed=0)


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
        self.token_table = torch.zeros(num_slots, max_model_len, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=device)
        # One value a slot. The columns of a type lie in one tensor, so that an admission fills them all at once.
        self._ints = torch.zeros(4, num_slots, dtype=torch.int32, device=device)
        self.computed_lens, self.known_lens, self.prompt_lens, self.top_k = self._ints.unbind()
        self._floats = torch.zeros(6, num_slots, dtype=torch.float32, device=device)
        self.temperature, self.top_p, self.min_p = self._floats[:3].unbind()
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = self._floats[3:].unbind()
        self.seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        # The rows of a step always lie here, padded to the end, so that a CUDA graph finds them.
        self._step = torch.zeros(3 * num_slots + 1, dtype=torch.int32, device=device)
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
        self.scored_slots: set[int] = set()
        """Those whose prompts are scored, until they are computed."""
        self._rows: HostRows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that its tensors take on the device."""
        tables = (self.token_table, self.block_tables, self._ints, self._floats, self.seeds)
        return sum(tensor.nbytes for tensor in (*tables, self._step, self._prefill_counter))

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
        if plan.block_appends:
            self._append_blocks(plan.block_appends)
        if plan.rows is not None:
            self._rows = self._upload_rows(plan.rows)
        elif plan.admissions and self._rows is not None:
            # The rows are the same, the requests in their slots are not.
            self._rows = replace(self._rows, sampling=self._rules_of(self._rows.rows))
        if self._rows is None:
            raise ValueError(f"step {plan.step} repeats the rows of a previous step, but there was none")
        return self._rows

    def _admit(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        known, blocks = len(admission.token_ids), len(admission.block_ids)
        tokens, block_ids, ints, floats, seed = upload_ints(
            [
                admission.token_ids,
                admission.block_ids,
                (admission.num_computed, known, admission.prompt_len, sampling.top_k),
                float_bits(
                    (
                        sampling.temperature,
                        sampling.top_p,
                        sampling.min_p,
                        sampling.repetition_penalty,
                        sampling.presence_penalty,
                        sampling.frequency_penalty,
                    )
                ),
                long_bits(sampling.seed),
            ],
            self.device,
        )
        self.token_table[slot, :known] = tokens
        self.block_tables[slot, :blocks] = block_ids
        self._ints[:, slot] = ints
        self._floats[:, slot] = floats.view(torch.float32)
        self.seeds.view(torch.int32).view(-1, 2)[slot] = seed
        self.host_known[slot] = known
        self.host_computed[slot] = admission.num_computed
        self.host_blocks[slot] = blocks
        self.host_prompt[slot] = admission.prompt_len
        self.sampling[slot] = sampling
        (self.scored_slots.discard if sampling.prompt_logprobs < 0 else self.scored_slots.add)(slot)

    def _append_blocks(self, appends: Sequence[tuple[int, Sequence[int]]]) -> None:
        slots: list[int] = []
        columns: list[int] = []
        values: list[int] = []
        for slot, block_ids in appends:
            first = self.host_blocks[slot]
            slots.extend([slot] * len(block_ids))
            columns.extend(range(first, first + len(block_ids)))
            values.extend(block_ids)
            self.host_blocks[slot] = first + len(block_ids)
        slot_index, column_index, ids = upload_ints([slots, columns, values], self.device)
        self.block_tables.index_put_((slot_index.long(), column_index.long()), ids)

    def _rules_of(self, rows: StepRows) -> tuple[RowSampling, ...]:
        pairs = zip(rows.slots, rows.samples, strict=True)
        return tuple(self.sampling[slot] if samples else GREEDY for slot, samples in pairs)

    def _upload_rows(self, rows: StepRows) -> HostRows:
        starts = [0]
        for count in rows.counts:
            starts.append(starts[-1] + count)
        padding = self.num_slots - len(rows.slots)
        (step,) = upload_ints(
            [
                [*rows.slots, *[-1] * padding, *starts, *starts[-1:] * padding, *rows.samples, *[0] * padding],
            ],
            self.device,
        )
        self._step.copy_(step)
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
