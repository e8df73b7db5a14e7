"""The ways to compute attention of prompts agree with float64, operations are counted, and crossings are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import prefill_attention
import pytest
import torch
from prefill_attention_plot import draw

COUNT, LENGTH = 2, 83


@pytest.fixture
def batch() -> prefill_attention.Batch:
    """Two prompts of four query heads over two KV heads."""
    torch.manual_seed(0)
    # PyTorch's fused attention is asked for by names that only a GPU's have; the kernels take what it takes.
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    return prefill_attention.make_batch((4, 2, 64), (COUNT, LENGTH), dtype, device)


def expected(batch: prefill_attention.Batch) -> torch.Tensor:
    """Query by query, in float64."""
    out = torch.empty(batch.q.shape, dtype=torch.float64)
    q, keys, values = (each.double().cpu() for each in (batch.q, batch.keys, batch.values))
    for token in range(COUNT * LENGTH):
        seen = slice(token // LENGTH * LENGTH, token + 1)
        for head in range(4):
            weights = (keys[seen, head // 2] @ q[token, head] * batch.scale).softmax(0)
            out[token, head] = weights @ values[seen, head // 2]
    return out


ON_A_GPU = ("SDPA", "Hopper")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.gpu] * (way in ON_A_GPU)) for way in prefill_attention.WAYS]
)
def test_every_way_computes_attention(way: str, batch: prefill_attention.Batch) -> None:
    if way == "Hopper" and not prefill_attention.fits_hopper_kernel(batch.q, batch.k_cache):
        pytest.skip("needs a Hopper GPU")
    batch.out.fill_(float("nan"))
    found = prefill_attention.WAYS[way](batch)
    tolerance = max(torch.finfo(found.dtype).eps, 1e-5)
    torch.testing.assert_close(found.double().cpu(), expected(batch), rtol=tolerance, atol=tolerance)


def test_the_reference_is_right(batch: prefill_attention.Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_attention, "QUERIES_AT_ONCE", 32)
    found = prefill_attention.float32_attention(batch)
    torch.testing.assert_close(found.double().cpu(), expected(batch), rtol=1e-5, atol=1e-5)


def test_operations_are_those_of_visible_pairs(batch: prefill_attention.Batch) -> None:
    pairs = COUNT * sum(range(1, LENGTH + 1))
    # A product and a sum for each of 64 elements, of scores and again of values.
    assert batch.operations == pairs * 4 * 64 * 2 * 2


def figure_of(way: str, length: int, ms: float, prompts: int = 1) -> dict[str, Any]:
    return {"heads": "4/2/64", "prompts": prompts, "length": length, "way": way, "ms": ms, "tflop_s": 1 / ms}


FIGURES = [
    *(figure_of(prefill_attention.OURS, length, 2.0) for length in (16, 256)),
    *(figure_of(prefill_attention.OURS, length, 9.0, prompts=4) for length in (16, 256)),
    *(figure_of("middle", length, ms) for length, ms in ((16, 1.0), (256, 4.0))),
    figure_of("too large", 16, 1.0),
]


def test_crossings_are_those_of_single_prompts() -> None:
    found = {each["way"]: each["length"] for each in prefill_attention.crossovers(FIGURES)}
    assert found == {"middle": 64, "too large": 256}


def test_the_picture_is_drawn_also_where_a_way_did_not_fit(tmp_path: Path) -> None:
    draw({"figures": FIGURES, "ceiling_tflop_s": 1.0}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
