"""The plain ways to compute attention agree with float64, and crossings are found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attention_baselines as baselines
import decode_attention
import pytest
import torch
from crossover import crossover
from decode_attention_plot import draw

from paceline.kernels.decode_work import plan_decode

ROWS, LENGTH = 3, 83


@pytest.fixture
def device() -> torch.device:
    """Where the Triton kernels run: the GPU, or the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def step(device: torch.device) -> decode_attention.Step:
    """Six query heads over two KV heads, head size 24, blocks in random order."""
    torch.manual_seed(0)
    blocks = -(-LENGTH // 16)
    k_cache, v_cache = torch.randn(2, ROWS * blocks, 16, 2, 24, device=device).unbind()
    tables = torch.randperm(ROWS * blocks, dtype=torch.int32, device=device).view(ROWS, blocks)
    q = torch.randn(ROWS, 6, 24, device=device)
    query_start = torch.arange(ROWS + 1, dtype=torch.int32, device=device)
    seq_lens = torch.full((ROWS,), LENGTH, dtype=torch.int32, device=device)
    return decode_attention.Step(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        seq_lens=seq_lens,
        slots=query_start[:-1],
        query_start=query_start,
        length=LENGTH,
        contiguous=(baselines.gather(k_cache, tables, LENGTH), baselines.gather(v_cache, tables, LENGTH)),
        out=torch.full_like(q, math.nan),
        work=plan_decode(query_start, seq_lens, 2),
    )


def expected(step: decode_attention.Step) -> torch.Tensor:
    """Token by token, in float64."""
    out = torch.empty(step.q.shape, dtype=torch.float64)
    for row, table in enumerate(step.block_tables.tolist()):
        slots = [(table[token // 16], token % 16) for token in range(LENGTH)]
        for head in range(6):
            keys = torch.stack([step.k_cache[block, offset, head // 3] for block, offset in slots]).double().cpu()
            values = torch.stack([step.v_cache[block, offset, head // 3] for block, offset in slots]).double().cpu()
            out[row, head] = (keys @ step.q[row, head].double().cpu() * step.scale).softmax(0) @ values
    return out


@pytest.mark.parametrize("way", decode_attention.WAYS)
def test_every_way_computes_attention(way: str, step: decode_attention.Step) -> None:
    found = decode_attention.WAYS[way](step)
    torch.testing.assert_close(found.double().cpu(), expected(step), rtol=1e-4, atol=1e-5)


def test_the_reference_is_right(step: decode_attention.Step) -> None:
    found = baselines.float32_attention(step.q, step.k_cache, step.v_cache, step.block_tables, LENGTH, step.scale)
    torch.testing.assert_close(found.double().cpu(), expected(step), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected_size"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0}, {1: 2.0, 2: 2.0, 4: 2.0}, 1),  # faster everywhere
        ({1: 3.0, 2: 3.0, 4: 3.0}, {1: 2.0, 2: 2.0, 4: 2.0}, None),  # nowhere
        ({16: 2.0, 256: 2.0}, {16: 1.0, 256: 4.0}, 64),  # half-way between the logarithms
        ({1: 1.0, 16: 2.0, 256: 2.0}, {1: 2.0, 16: 1.0, 256: 4.0}, 64),  # an early lead that is lost does not count
        ({16: 2.0, 256: 2.0}, {16: 1.0, 256: None}, 256),  # the other does not fit
        ({16: 2.0, 256: None}, {16: 3.0, 256: 4.0}, None),  # ours does not
        ({16: 2.0}, {16: 2.0}, None),  # no faster
    ],
)
def test_crossover(ours: dict[int, Any], theirs: dict[int, Any], expected_size: int | None) -> None:
    assert crossover(ours, theirs) == expected_size


def figure_of(way: str, context: int, ms: float | None) -> dict[str, Any]:
    of_copy = None if ms is None else 0.5
    return {"heads": "6/2/24", "batch": 4, "context": context, "way": way, "ms": ms, "of_copy": of_copy}


def test_crossings_are_those_of_each_other_way() -> None:
    figures = [
        *(figure_of(decode_attention.OURS, context, 2.0) for context in (16, 256)),
        *(figure_of("early", context, 8.0) for context in (16, 256)),
        *(figure_of("middle", context, ms) for context, ms in ((16, 1.0), (256, 4.0))),
    ]
    found = {each["way"]: each["context"] for each in decode_attention.crossovers(figures)}
    assert found == {"early": 16, "middle": 64}


def test_the_picture_is_drawn_also_where_a_way_did_not_fit(tmp_path: Path) -> None:
    figures = [
        figure_of("paceline", 16, 1.0),
        figure_of("SDPA", 16, 2.0),
        figure_of("paceline", 256, 3.0),
        figure_of("SDPA", 256, None),
    ]
    draw({"figures": figures}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
