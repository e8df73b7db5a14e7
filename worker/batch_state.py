"""What a rank remembers between steps: one row a slot, on the device, changed only by the plans' deltas.

Token ids sampled by a step are written into the token table on the device itself, so that the next step's inputs
need nothing from the host but which slots run. The host keeps counts alone (never values) in plain lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.coordinator.messages import Admission, RowSampling, StepPlan, StepRows
from paceline.kernels.prepare_inputs import prepare_inputs
from paceline.model.context import KVCache, StepContext
from paceline.worker.upload import float_bits, upload_ints

GREEDY = RowSampling(temperature=0.0, seed=0)


@dataclass(frozen=True)
class DeviceRows:
    """The rows of a step with their device tensors; kept while the rows stay the same."""

    rows: StepRows
    slots: torch.Tensor
    """[R] int64."""
    counts: torch.Tensor
    """[R] int32."""
    query_start: torch.Tensor
    """[R + 1] int32."""
    sampled_slots: torch.Tensor
    """[S] int64: slots of the rows that sample."""
    logits_rows: torch.Tensor
    """[S] int64: the last token of each of them."""
    sampled_slot_list: tuple[int, ...]
    sampling: tuple[RowSampling, ...]
    """The rules of each of them."""
    num_tokens: int
    num_decode_rows: int
    max_query_len: int


class BatchState:
    """Token table, lengths, block tables and sampling state of every slot."""

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
        # Host mirrors: counts are known without asking the device.
        self.host_computed = [0] * num_slots
        self.host_known = [0] * num_slots
        self.host_blocks = [0] * num_slots
        self.host_prompt = [0] * num_slots
        self.sampling: list[RowSampling] = [GREEDY] * num_slots
        self._rows: DeviceRows | None = None

    def apply(self, plan: StepPlan) -> DeviceRows:
        """Take in the plan's delta; return the rows to run. Freed slots need no action: admission overwrites them."""
        for admission in plan.admissions:
            self._admit(admission)
        if plan.block_appends:
            self._append_blocks(plan.block_appends)
        if plan.rows is not None:
            self._rows = self._upload_rows(plan.rows)
        elif plan.admissions and self._rows is not None:
            # The rows are the same, the requests in their slots are not.
            self._rows = replace(self._rows, sampling=self._rules_of(self._rows.sampled_slot_list))
        if self._rows is None:
            raise ValueError(f"step {plan.step} repeats the rows of a previous step, but there was none")
        return self._rows

    def _admit(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        known, blocks = len(admission.token_ids), len(admission.block_ids)
        tokens, block_ids, ints, floats = upload_ints(
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
            ],
            self.device,
        )
        self.token_table[slot, :known] = tokens
        self.block_tables[slot, :blocks] = block_ids
        self._ints[:, slot] = ints
        self._floats[:, slot] = floats.view(torch.float32)
        self.seeds[slot] = sampling.seed
        self.host_computed[slot] = admission.num_computed
        self.host_known[slot] = known
        self.host_blocks[slot] = blocks
        self.host_prompt[slot] = admission.prompt_len
        self.sampling[slot] = sampling

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

    def _rules_of(self, slots: Sequence[int]) -> tuple[RowSampling, ...]:
        return tuple(self.sampling[slot] for slot in slots)

    def _upload_rows(self, rows: StepRows) -> DeviceRows:
        starts = [0]
        for count in rows.counts:
            starts.append(starts[-1] + count)
        sampling = [index for index, samples in enumerate(rows.samples) if samples]
        sampled_slots = [rows.slots[index] for index in sampling]
        last_tokens = [starts[index + 1] - 1 for index in sampling]
        slots, counts, query_start, sampled, logits_rows = upload_ints(
            [rows.slots, rows.counts, starts, sampled_slots, last_tokens], self.device
        )
        decode_rows = 0
        for count in rows.counts:
            if count != 1:
                break
            decode_rows += 1
        return DeviceRows(
            rows=rows,
            slots=slots.long(),
            counts=counts,
            query_start=query_start,
            sampled_slots=sampled.long(),
            logits_rows=logits_rows.long(),
            sampled_slot_list=tuple(sampled_slots),
            sampling=self._rules_of(sampled_slots),
            num_tokens=starts[-1],
            num_decode_rows=decode_rows,
            max_query_len=max(rows.counts),
        )

    def inputs(self, rows: DeviceRows, kv_caches: Sequence[KVCache]) -> tuple[torch.Tensor, StepContext]:
        """The step's token ids [T] int64 and its context, built on the device from the tables."""
        input_ids, positions, slot_mapping = prepare_inputs(
            self.token_table,
            self.computed_lens,
            self.block_tables,
            rows.slots,
            rows.query_start,
            rows.num_tokens,
            self.block_size,
        )
        host_lens = [self.host_computed[s] + c for s, c in zip(rows.rows.slots, rows.rows.counts, strict=True)]
        max_seq_len = max(host_lens)
        width = -(-max_seq_len // self.block_size)
        context = StepContext(
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=rows.query_start,
            seq_lens=self.computed_lens[rows.slots] + rows.counts,
            block_tables=self.block_tables[:, :width].index_select(0, rows.slots),
            logits_rows=rows.logits_rows,
            kv_caches=kv_caches,
            num_decode_rows=rows.num_decode_rows,
            max_query_len=rows.max_query_len,
            max_seq_len=max_seq_len,
        )
        return input_ids, context

    def advance(self, rows: DeviceRows, token_ids: torch.Tensor) -> None:
        """Count the step's tokens as computed and append the sampled ids [S] to their requests."""
        self.computed_lens.index_add_(0, rows.slots, rows.counts)
        slots = rows.sampled_slots
        columns = self.known_lens[slots].long()
        self.token_table.index_put_((slots, columns), token_ids.to(torch.int32))
        self.known_lens.index_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
        for slot, count in zip(rows.rows.slots, rows.rows.counts, strict=True):
            self.host_computed[slot] += count
        for slot in rows.sampled_slot_list:
            self.host_known[slot] += 1
