"""This project's logits of a checkpoint, over a small paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from paceline.model.communicator import Communicator, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.context import KVCache, StepContext
from paceline.model.decoder import CausalLM
from paceline.model.shard_plan import ShardPlan
from paceline.model.staging import StagingMemory
from paceline.model.weights import load_model

Steps = Sequence[Sequence[tuple[int, int]]]
"""For each step its (row, number of tokens) pairs, rows of one token first."""


class PagedRows:
    """Rows of tokens over one cache of blocks in scattered order; what nobody wrote is NaN."""

    def __init__(self, model: CausalLM, comm: Communicator, rows: Sequence[Sequence[int]], block_size: int = 4) -> None:
        self._model = model
        self._comm = comm
        self._rows = rows
        self._block_size = block_size
        self._computed = [0] * len(rows)
        blocks_per_row = -(-max(map(len, rows)) // block_size)
        num_blocks = blocks_per_row * len(rows)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self._block_tables = order.view(len(rows), blocks_per_row).to(torch.int32)
        config = model.config
        heads = ShardPlan(config, comm.size).kv_heads(comm.rank).padded
        shape = (num_blocks, block_size, heads, config.head_dim)
        dtype = model.lm_head.weight.dtype
        self.kv_caches: list[KVCache] = [
            (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
            for _ in range(config.num_hidden_layers)
        ]

    def step(self, counts: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Compute so many more tokens of these rows; the logits [count, vocab_size] of each."""
        ids, positions, slots, starts = [], [], [], [0]
        for row, count in counts:
            for position in range(self._computed[row], self._computed[row] + count):
                block = int(self._block_tables[row, position // self._block_size])
                ids.append(self._rows[row][position])
                positions.append(position)
                slots.append(block * self._block_size + position % self._block_size)
            self._computed[row] += count
            starts.append(len(ids))
        chosen = [row for row, _ in counts]
        seq_lens = [self._computed[row] for row in chosen]
        ctx = StepContext(
            positions=torch.tensor(positions, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=self._block_tables,
            row_slots=torch.tensor(chosen, dtype=torch.int32),
            logits_tokens=None,
            kv_caches=self.kv_caches,
        )
        with torch.inference_mode():
            local = self._model.logits(*self._model(torch.tensor(ids), ctx))
            whole = self._comm.all_gather(local)[:, : self._model.config.vocab_size]
        return list(whole.split([count for _, count in counts]))


@pytest.fixture(scope="session")
def paged_rows() -> type[PagedRows]:
    """The class, for tests that look into the cache."""
    return PagedRows


@pytest.fixture(scope="session")
def logits_of() -> Callable[..., list[torch.Tensor]]:
    """logits_of(folder, tp, rows, steps): [T, vocab_size] of each row, after checking that all ranks agree."""

    def compute(folder: Path, tp: int, rows: Sequence[Sequence[int]], steps: Steps | None = None) -> list[torch.Tensor]:
        config = ModelConfig.from_folder(folder)
        steps = steps or [[(index, len(row)) for index, row in enumerate(rows)]]

        def body(comm: Communicator) -> list[torch.Tensor]:
            with StagingMemory(torch.device("cpu"), tp) as staging:
                model = load_model(folder, config, comm, staging, torch.float32, max_model_len=64)
            paged = PagedRows(model, comm, rows)
            parts: list[list[torch.Tensor]] = [[] for _ in rows]
            for counts in steps:
                for (row, _), logits in zip(counts, paged.step(counts), strict=True):
                    parts[row].append(logits)
            return [torch.cat(row_parts) for row_parts in parts]

        by_rank = run_simulated_ranks(tp, body)
        for other in by_rank[1:]:
            assert all(torch.equal(mine, first) for mine, first in zip(other, by_rank[0], strict=True))
        return by_rank[0]

    return compute
