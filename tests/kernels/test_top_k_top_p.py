"""Filters before sampling, against an oracle that sorts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.top_k_top_p import filter_logits, filter_logits_reference, filter_logits_triton

Filter = Callable[..., torch.Tensor]
INF, NAN = float("inf"), float("nan")
BOTH = pytest.mark.parametrize("run", [filter_logits_reference, filter_logits_triton])


def keep_by_sorting(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return one row with dropped tokens at -inf, by the definitions."""
    ordered = logits.double().sort(descending=True).values
    kth = ordered[top_k - 1] if 0 < top_k < len(ordered) else ordered[-1]
    probabilities = (ordered[ordered >= kth] / temperature).softmax(0)
    before = probabilities.cumsum(0) - probabilities
    nucleus = max(1, int((before < top_p).sum()))
    floor = ordered[nucleus - 1]
    likely = ordered[: len(probabilities)][probabilities >= min_p * probabilities[0]].min()
    return torch.where(logits >= torch.maximum(floor, likely), logits, -INF)


def settings(device: torch.device, *rows: tuple[float, int, float, float]) -> list[torch.Tensor]:
    """Return the tensors of rows of (temperature, top_k, top_p, min_p)."""
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    return [
        torch.tensor(column, dtype=dtype, device=device)
        for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)
    ]


MIXED = [
    (1.0, 0, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.3, 50, 0.8, 0.02),
    (2.0, 1, 0.5, 0.5),
    (0.3, 0, 0.999, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1e-10, 0, 0.9, 0.1),
    (0.0, 5, 0.5, 0.5),
    (1.0, 10**6, 1.0, 0.0),
]


@BOTH
@pytest.mark.parametrize("width", [100, 2500])
def test_keeps_what_sorting_keeps(run: Filter, width: int, device: torch.device) -> None:
    logits = torch.randn(len(MIXED), width, device=device) * 3
    before = logits.cpu().clone()
    out = run(logits, *settings(device, *MIXED))
    assert out is logits
    for row, (temperature, top_k, top_p, min_p) in enumerate(MIXED):
        if temperature == 0:
            assert torch.equal(out[row].cpu(), before[row])
        else:
            assert torch.equal(out[row].cpu(), keep_by_sorting(before[row], temperature, top_k, top_p, min_p)), row


@BOTH
@pytest.mark.parametrize(
    ("logits", "setting", "kept"),
    [
        ([3.0, 1.0, 3.0, 2.0, 2.0, 2.0], (1.0, 3, 1.0, 0.0), [0, 2, 3, 4, 5]),
        ([0.0, 0.0, 0.0, 0.0], (1.0, 0, 0.5, 0.0), [0, 1, 2, 3]),
        ([-0.0, 0.0, -1.0], (1.0, 1, 1.0, 0.0), [0, 1]),
        ([5.0, 4.0, -2.0], (1.0, 0, 0.0, 0.0), [0]),
        ([5.0, 4.0, -2.0], (1.0, 0, 1.0, 1.0), [0]),
        ([5.0, 5.0, 4.0], (1e-10, 0, 0.9, 0.0), [0, 1]),
        ([1e30, -1e30, 0.0], (1e-10, 0, 0.9, 0.5), [0]),
        ([2.0, NAN, 1.0, NAN], (1.0, 2, 1.0, 0.0), [0, 2]),
        ([-INF, 2.0, -INF, 1.9], (1.0, 3, 0.9, 0.0), [1, 3]),
        ([-INF, INF, 3.0, INF], (1.0, 3, 0.9, 0.1), [1, 3]),
        ([-INF, -INF], (1.0, 1, 0.5, 0.5), []),
    ],
)
def test_edges(
    run: Filter, logits: list[float], setting: tuple[float, int, float, float], kept: list[int], device: torch.device
) -> None:
    out = run(torch.tensor([logits], device=device), *settings(device, setting))[0].cpu()
    assert (out > -INF).nonzero().flatten().tolist() == kept
    assert not out.isnan().any()
    assert torch.equal(out[kept], torch.tensor(logits)[kept])


@BOTH
@pytest.mark.parametrize("setting", [(1.0, 0, 1.0, 0.0), (1.0, 4, 1.0, 0.0), (0.0, 2, 0.1, 0.9)])
def test_nothing_to_filter_keeps_every_bit(
    run: Filter, setting: tuple[float, int, float, float], device: torch.device
) -> None:
    logits = torch.tensor([[NAN, -0.0, -INF, 1e-42]], device=device)
    bits = logits.clone().view(torch.int32)
    assert torch.equal(run(logits, *settings(device, setting)).view(torch.int32), bits)


@BOTH
def test_rows_of_a_wider_tensor(run: Filter, device: torch.device) -> None:
    """A gathered vocabulary ends before its padding does: the rows lie further apart than they are wide."""
    wide = torch.randn(len(MIXED), 107, device=device) * 3
    before = wide.clone()
    expected = filter_logits_reference(before[:, :100].cpu().contiguous(), *settings(torch.device("cpu"), *MIXED))
    run(wide[:, :100], *settings(device, *MIXED))
    assert torch.equal(wide[:, :100].cpu(), expected)
    assert torch.equal(wide[:, 100:], before[:, 100:])


@pytest.mark.gpu
def test_large() -> None:
    logits = torch.randn(8 * len(MIXED), 151936, device="cuda") * 3
    rows = settings(logits.device, *MIXED * 8)
    expected = filter_logits_reference(logits.cpu(), *(tensor.cpu() for tensor in rows))
    actual = filter_logits(logits.clone(), *rows).cpu()
    # Float32 sums of the mass may part from the exact ones at the last token of a nucleus.
    assert ((actual > -INF).sum(1) - (expected > -INF).sum(1)).abs().max() <= 1
    assert ((actual != expected).sum(1) <= 1).all()
