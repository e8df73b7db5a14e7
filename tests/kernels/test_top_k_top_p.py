"""Cutoffs of top-k, top-p and min-p, against an oracle that sorts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.launch import launch
from paceline.kernels.top_k_top_p import find_cutoffs, find_cutoffs_reference, find_cutoffs_triton
from paceline.kernels.top_k_top_p_search import search_kernel

Find = Callable[..., torch.Tensor]
INF, NAN = float("inf"), float("nan")
BOTH = pytest.mark.parametrize("find", [find_cutoffs_reference, find_cutoffs_triton])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def kept(find: Find, logits: torch.Tensor, settings: list[torch.Tensor]) -> torch.Tensor:
    """Which logits are at or above their rows' cutoffs, on the CPU; all rows, with a setting each."""
    cutoffs = find(logits, torch.arange(logits.shape[0], dtype=torch.int32, device=logits.device), *settings)
    assert cutoffs.dtype == torch.float32
    return (logits.float() >= cutoffs[:, None]).cpu()


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [100, 2500])
def test_keeps_what_sorting_keeps(find: Find, width: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = (torch.randn(len(MIXED), width, device=device) * 3).to(dtype)
    before = logits.clone()
    actual = kept(find, logits, settings(device, *MIXED))
    assert torch.equal(logits, before)
    for row, (temperature, top_k, top_p, min_p) in enumerate(MIXED):
        whole = before[row].float().cpu()
        expected = whole if temperature == 0 else keep_by_sorting(whole, temperature, top_k, top_p, min_p)
        assert torch.equal(actual[row], expected > -INF), row


@BOTH
@DTYPES
@pytest.mark.parametrize(
    ("logits", "setting", "stay"),
    [
        ([3.0, 1.0, 3.0, 2.0, 2.0, 2.0], (1.0, 3, 1.0, 0.0), [0, 2, 3, 4, 5]),
        ([0.0, 0.0, 0.0, 0.0], (1.0, 0, 0.5, 0.0), [0, 1, 2, 3]),
        ([-0.0, 0.0, -1.0], (1.0, 1, 1.0, 0.0), [0, 1]),
        ([-0.0, 0.0, -1.0, 1.0], (1.0, 0, 1.0, 0.36), [0, 1, 3]),
        ([5.0, 4.0, -2.0], (1.0, 0, 0.0, 0.0), [0]),
        ([5.0, 4.0, -2.0], (1.0, 0, 1.0, 1.0), [0]),
        ([5.0, 5.0, 4.0], (1e-10, 0, 0.9, 0.0), [0, 1]),
        ([1e30, -1e30, 0.0], (1e-10, 0, 0.9, 0.5), [0]),
        ([2.0, NAN, 1.0, NAN], (1.0, 2, 1.0, 0.0), [0, 2]),
        ([-INF, 2.0, -INF, 1.9], (1.0, 3, 0.9, 0.0), [1, 3]),
        ([-INF, INF, 3.0, INF], (1.0, 3, 0.9, 0.1), [1, 3]),
        ([-INF, INF, 3.0, INF], (1.0, 0, 1.0, 0.1), [1, 3]),
        ([-INF, -INF], (1.0, 1, 0.5, 0.5), [0, 1]),
    ],
)
def test_edges(
    find: Find,
    logits: list[float],
    setting: tuple[float, int, float, float],
    stay: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    actual = kept(find, torch.tensor([logits], dtype=dtype, device=device), settings(device, setting))[0]
    assert actual.nonzero().flatten().tolist() == stay


@DTYPES
def test_any_two_neighbours_of_a_type_are_told_apart(dtype: torch.dtype, device: torch.device) -> None:
    """Subnormal ones too, where Triton's interpreter has them; and zero from zero is not."""
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    least = torch.finfo(dtype).tiny if dtype == torch.bfloat16 else 0.0
    around = torch.tensor([least, 1.0, 1000.0], dtype=dtype)
    sizes = (around.view(bits)[:, None] + torch.arange(3, dtype=bits)).view(dtype).flatten()
    row = torch.cat([sizes, -sizes, sizes[:1] * 0, sizes[:1] * -0.0])
    ks = [(1.0, k, 1.0, 0.0) for k in range(1, len(row))]
    logits = row.repeat(len(ks), 1)
    expected = kept(find_cutoffs_reference, logits, settings(torch.device("cpu"), *ks))
    assert torch.equal(kept(find_cutoffs_triton, logits.to(device), settings(device, *ks)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [1, -1])
def test_masses_that_rounding_keeps_from_their_target_let_no_more_stay_than_was_collected(
    sign: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The interval begins between two neighbours of the type, of which it holds the larger."""
    near, far = torch.tensor([4.0], dtype=dtype), torch.tensor([4.0], dtype=dtype).view(torch.int16) + 1
    below, least = sorted((sign * near.item(), sign * far.view(dtype).item()))
    low, peak, unit = (3 * below + least) / 4, 6.0, 2**40
    logits = torch.tensor([[peak, least, below]], dtype=dtype, device=device)
    bounds = torch.tensor([peak, low, INF], device=device)
    totals = torch.tensor([2, 8 * unit, 0, 0, 8 * unit], device=device)
    candidates = torch.tensor([least, peak], device=device)
    cutoffs = torch.empty(1, device=device)
    launch(
        search_kernel,
        (1,),
        logits, torch.zeros(1, dtype=torch.int32, device=device), *settings(device, (1.0, 0, 0.9, 0.0)),
        bounds, totals, candidates, cutoffs, 3, 3,
        BLOCK=64, CAPACITY=2, SHIFT=16 if dtype == torch.bfloat16 else 13,
    )  # fmt: skip
    assert cutoffs.tolist() == [least]


@BOTH
@pytest.mark.parametrize("setting", [(1.0, 0, 1.0, 0.0), (1.0, 4, 1.0, 0.0), (0.0, 2, 0.1, 0.9)])
def test_nothing_to_filter_is_no_cutoff(
    find: Find, setting: tuple[float, int, float, float], device: torch.device
) -> None:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    logits = torch.tensor([[NAN, -0.0, -INF, 1e-42]], device=device)
    assert find(logits, zero, *settings(device, setting)).tolist() == [-INF]


@BOTH
def test_rows_with_settings_of_any_slots(find: Find, device: torch.device) -> None:
    """Of a tensor whose rows lie further apart than they are wide: a vocabulary ends before its padding does."""
    wide = torch.randn(5, 107, device=device) * 3
    slots = torch.tensor([4, 2, 6, 1, 3], dtype=torch.int32, device=device)
    actual = find(wide[:, :100], slots, *settings(device, *MIXED)).cpu()
    logits = wide[:, :100].cpu().contiguous()
    alone = settings(torch.device("cpu"), *(MIXED[slot] for slot in slots.tolist()))
    assert torch.equal(logits >= actual[:, None], kept(find_cutoffs_reference, logits, alone))


@BOTH
def test_padding_is_not_filtered(find: Find, device: torch.device) -> None:
    """Nor are settings read for it, which would be some other tensor's values."""
    around = settings(device, *[(1.0, 2, 0.5, 0.5)] * 3)
    slots = torch.tensor([0, -1, 1, -1], dtype=torch.int32, device=device)
    cutoffs = find(torch.randn(4, 100, device=device), slots, *(each[1:] for each in around)).tolist()
    assert cutoffs[1] == cutoffs[3] == -INF
    assert min(cutoffs[0], cutoffs[2]) > -INF


def kinds_of_rows(width: int) -> list[torch.Tensor]:
    """Return rows [width] float32 that filters find easy or hard, one of a kind."""
    normal, place = torch.randn(width), torch.randperm(width)
    spike, masked = normal.clone(), torch.full((width,), -INF)
    spike[place[0]] = 30.0
    masked[place[: width // 50]] = normal[: width // 50]
    holes = torch.where(torch.rand(width) < 0.3, NAN, normal * 3)
    likely_few = torch.where(place < width // 20, normal * 3 + 8, normal - 5)
    return [
        normal,
        normal * 3,
        normal * 0.01 + 1000,
        (normal * 3).round(),
        torch.zeros(width),
        spike,
        masked,
        holes,
        likely_few,
        -(place + 1.0).log(),
        torch.where(place % 2 == 0, -1e30, normal),
    ]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rows of a few hundred logits take every part of the Triton version that rows of 100,000 take."""
    for name, value in (("TILE", 256), ("COLLECT_TILE", 128), ("SEARCH_BLOCK", 64), ("SAMPLE", 256), ("CAPACITY", 300)):
        monkeypatch.setattr(f"paceline.kernels.top_k_top_p._{name}", value)


@pytest.mark.usefixtures("small_parts")
@DTYPES
@pytest.mark.parametrize("shift", range(4))
def test_any_row_under_any_setting(shift: int, dtype: torch.dtype, device: torch.device) -> None:
    """Over the shifts, a row of every kind meets a third of the settings, and some meet a large k."""
    logits = torch.stack(kinds_of_rows(601)).to(dtype)
    rows = [*MIXED[3 * shift :], *MIXED[: 3 * shift]]
    rows[9 - shift] = (1.0, 200 + 50 * shift, 1.0, 0.0)
    expected = kept(find_cutoffs_reference, logits, settings(torch.device("cpu"), *rows))
    actual = kept(find_cutoffs_triton, logits.to(device), settings(device, *rows))
    for row, setting in enumerate(rows):
        assert torch.equal(actual[row], expected[row]), f"{row}: {setting}"


@pytest.mark.usefixtures("small_parts")
@DTYPES
@pytest.mark.parametrize(
    "setting", [(1.0, 180, 1.0, 0.0), (1.0, 400, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (3.0, 0, 0.5, 0.1)]
)
def test_thresholds_far_from_the_peak(
    setting: tuple[float, int, float, float], dtype: torch.dtype, device: torch.device
) -> None:
    """Most of what is kept lies above the logits that are searched."""
    logits = torch.randn(3, 601).to(dtype)
    expected = kept(find_cutoffs_reference, logits, settings(torch.device("cpu"), *[setting] * 3))
    assert torch.equal(kept(find_cutoffs_triton, logits.to(device), settings(device, *[setting] * 3)), expected)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("seen", [4.0, -40.0])
@pytest.mark.parametrize("setting", [(1.0, 20, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (1.0, 300, 0.9, 0.0)])
def test_a_sample_that_misleads(seen: float, setting: tuple[float, int, float, float], device: torch.device) -> None:
    """Every third logit, all that the sample sees, is unlike the others: the threshold is not where it seems to be."""
    logits = torch.randn(1, 601)
    logits[:, ::3] = seen + torch.randn(201) * 0.01
    expected = kept(find_cutoffs_reference, logits, settings(torch.device("cpu"), setting))
    assert torch.equal(kept(find_cutoffs_triton, logits.to(device), settings(device, setting)), expected)


@BOTH
@pytest.mark.parametrize("setting", [(1.0, 1, 0.5, 0.5), (1.0, 0, 0.0, 0.0), (0.5, 3, 1.0, 1.0)])
def test_a_vocabulary_of_one(find: Find, setting: tuple[float, int, float, float], device: torch.device) -> None:
    assert kept(find, torch.tensor([[-7.0]], device=device), settings(device, setting)).all()


@pytest.mark.gpu
def test_rows_wide_enough_for_samples_do_not_depend_on_their_batch() -> None:
    cuda = torch.device("cuda")
    logits = torch.stack(kinds_of_rows(50021)).to(cuda)
    setting = settings(cuda, (0.9, 0, 0.95, 0.0))
    slots = torch.zeros(len(logits), dtype=torch.int32, device=cuda)
    together = find_cutoffs(logits, slots, *setting)
    for row in range(len(logits)):
        assert torch.equal(find_cutoffs(logits[row : row + 1], slots[:1], *setting), together[row : row + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [151936, 32003])
def test_large(width: int, dtype: torch.dtype) -> None:
    kinds = kinds_of_rows(width)
    rows = [setting for _ in kinds for setting in MIXED]
    logits = torch.stack([row for row in kinds for _ in MIXED]).to(dtype)
    actual = kept(find_cutoffs, logits.cuda(), settings(torch.device("cuda"), *rows))
    expected = kept(find_cutoffs_reference, logits, settings(torch.device("cpu"), *rows))
    # The sums of the mass differ in rounding, and may part at the last logit of a nucleus.
    for row, values in enumerate(logits):
        assert len(values[actual[row] != expected[row]].unique()) <= 1, (row, rows[row])
