"""Sampling by Gumbel noise: the argmax at temperature 0, the softmax above it, the same draws for the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.kernels.gumbel_argmax import (
    gumbel_argmax,
    gumbel_argmax_reference,
    gumbel_argmax_triton,
    token_ids_of,
)
from paceline.kernels.gumbel_noise import gumbel_noise

Sample = Callable[..., torch.Tensor]
INF, NAN = float("inf"), float("nan")
NOISE_ERROR = 3e-6
"""Of the kernel, whose logarithms are the GPU's own."""
GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def argmax_by_kernel(logits: torch.Tensor, *settings: Any, cutoffs: torch.Tensor | None = None) -> torch.Tensor:
    return gumbel_argmax_triton(
        logits, *settings, no_cutoffs(logits) if cutoffs is None else cutoffs, arrivals_for(logits)
    )


def argmax_by_reference(logits: torch.Tensor, *settings: Any, cutoffs: torch.Tensor | None = None) -> torch.Tensor:
    return gumbel_argmax_reference(logits, *settings, no_cutoffs(logits) if cutoffs is None else cutoffs)


def no_cutoffs(logits: torch.Tensor) -> torch.Tensor:
    return torch.full((logits.shape[0],), -INF, device=logits.device)


def arrivals_for(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)


BOTH = pytest.mark.parametrize("sample", [argmax_by_reference, argmax_by_kernel])


def scores_of(keys: torch.Tensor) -> torch.Tensor:
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def rows(
    num_rows: int, temperature: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return temperatures, seeds (any 64 bits) and positions of shuffled slots, and the rows' slots."""
    return (
        torch.full((num_rows,), temperature, device=device),
        torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=device),
        torch.randint(2**17, (num_rows,), dtype=torch.int32, device=device),
        torch.randperm(num_rows, device=device).to(torch.int32),
    )


@BOTH
@pytest.mark.parametrize(
    ("logits", "winner"),
    [
        ([1.0, 3.0, 2.0], 1),
        ([-5.0, -3.0, -4.0], 1),
        ([2.0, 7.0, 7.0], 1),
        ([-0.0, 0.0, -1.0], 0),
        ([0.0, -0.0, -1.0], 0),
        ([NAN, -9.0, NAN], 1),
        ([-INF, -INF, -1e38], 2),
        ([-INF, -INF, -INF], 0),
        ([NAN, NAN, NAN], 0),
        ([1.0, INF, 3.0], 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_zero_is_argmax(
    sample: Sample, logits: list[float], winner: int, dtype: torch.dtype, device: torch.device
) -> None:
    keys = sample(torch.tensor([logits], device=device).to(dtype), *rows(1, 0.0, device), 0, 3)
    assert token_ids_of(keys).tolist() == [winner]


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_shards_agree_with_the_whole_vocabulary(sample: Sample, temperature: float, device: torch.device) -> None:
    logits, settings = torch.randn(6, 300, device=device), rows(6, temperature, device)
    whole = sample(logits, *settings, 0, 300)
    keys = []
    for start, stop in ((0, 128), (128, 256), (256, 300), (300, 300)):
        shard = torch.full((6, 128), 1e9, device=device)
        shard[:, : stop - start] = logits[:, start:stop]
        keys.append(sample(shard, *settings, start, stop - start))
    assert torch.equal(torch.stack(keys).amax(0), whole)


@BOTH
def test_an_empty_shard_loses_to_a_shard_of_impossible_tokens(sample: Sample, device: torch.device) -> None:
    settings = rows(1, 0.0, device)
    impossible = sample(torch.full((1, 4), -INF, device=device), *settings, 2**31 - 5, 4)
    assert sample(torch.full((1, 4), INF, device=device), *settings, 0, 0) < impossible


@BOTH
def test_rows_do_not_depend_on_their_batch(sample: Sample, device: torch.device) -> None:
    logits = torch.randn(5, 200, device=device)
    temperature, seeds, positions, slots = rows(5, 1.0, device)
    temperature[2] = 0.0
    batch = sample(logits, temperature, seeds, positions, slots, 0, 200)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    for row, slot in enumerate(slots.tolist()):
        settings = (temperature[slot, None], seeds[slot, None], positions[slot, None].long())
        single = sample(logits[row, None].contiguous(), *settings, first, 0, 200)
        assert torch.equal(single, batch[row, None])


@BOTH
def test_a_row_without_a_slot_is_padding(sample: Sample, device: torch.device) -> None:
    logits = torch.randn(4, 200, device=device)
    temperature, seeds, positions, _ = rows(4, 1.0, device)
    slots = torch.tensor([3, 0, 1, 2], dtype=torch.int32, device=device)
    full = sample(logits, temperature, seeds, positions, slots, 0, 200)
    slots[1] = slots[3] = -1
    logits[1] = INF
    padded = sample(logits, temperature, seeds, positions, slots, 0, 200)
    impossible = sample(torch.full((1, 200), -INF, device=device), temperature, seeds, positions, slots[:1], 0, 200)
    assert torch.equal(padded[::2], full[::2])
    assert (padded[1::2] < impossible).all()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_below_a_row_s_cutoff_is_drawn(sample: Sample, dtype: torch.dtype, device: torch.device) -> None:
    """What is equal to it may be, NaN may not; the other rows' draws are as they were, and logits keep their bits."""
    logits = torch.randn(40, 300, device=device).to(dtype)
    logits[:, 7] = NAN
    settings, before = rows(40, 2.0, device), logits.clone()
    free = sample(logits, *settings, 0, 300)
    cutoffs = no_cutoffs(logits)
    cutoffs[::2] = logits.float().nan_to_num(-INF).topk(5).values[::2, -1]
    drawn = token_ids_of(sample(logits, *settings, 0, 300, cutoffs=cutoffs))
    assert torch.equal(drawn[1::2], token_ids_of(free)[1::2])
    taken = logits.float()[::2].gather(1, drawn[::2, None])[:, 0]
    assert (taken >= cutoffs[::2]).all()
    assert (taken == cutoffs[::2]).any()
    dropped = torch.where(logits.float() >= cutoffs[:, None], logits.float(), -INF)
    assert torch.equal(drawn, token_ids_of(sample(dropped, *settings, 0, 300)))
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8))


@BOTH
def test_winners_anywhere_in_a_row_of_many_programs(sample: Sample, device: torch.device) -> None:
    """Twice: a launch must leave the counts of arrived programs as it found them."""
    width, columns = 5003, [0, 1023, 1024, 4095, 4096, 5002]
    logits = torch.zeros(len(columns), width, device=device)
    logits[torch.arange(len(columns)), columns] = 99.0
    settings = rows(len(columns), 1.0, device)
    for _ in range(2):
        assert token_ids_of(sample(logits, *settings, 7, width)).tolist() == [7 + column for column in columns]


@pytest.mark.parametrize("kernel", [False, True])
def test_one_shard_alone_can_give_token_ids(kernel: bool, device: torch.device) -> None:
    where = device if kernel else torch.device("cpu")
    logits = torch.randn(3, 3000, device=where)
    temperature, seeds, positions, slots = rows(3, 0.7, where)
    slots[1] = -1
    settings = (logits, temperature, seeds, positions, slots, 0, 2900, no_cutoffs(logits), arrivals_for(logits))
    run = gumbel_argmax_triton if kernel else gumbel_argmax
    assert torch.equal(run(*settings, as_token_ids=True), token_ids_of(run(*settings)))


@pytest.fixture(params=[1, 2, 8])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program of two rows of at most 8,192 columns take so many steps."""
    monkeypatch.setattr("paceline.kernels.gumbel_argmax._FULL_GRID", 2 * 8 // request.param)


@pytest.mark.usefixtures("steps")
def test_equal_scores_go_to_the_lowest_id(device: torch.device) -> None:
    logits = torch.zeros(2, 8000, device=device)
    for column in (7999, 5001, 3077, 3076, 2053):
        logits[:, column] = 1.0
        keys = argmax_by_kernel(logits, *rows(2, 0.0, device), 0, 8000)
        assert token_ids_of(keys).tolist() == [column] * 2


def test_keys_do_not_depend_on_the_number_of_steps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, settings = torch.randn(2, 8100, device=device), rows(2, 0.8, device)
    keys = []
    for full_grid in (16, 4, 1):
        monkeypatch.setattr("paceline.kernels.gumbel_argmax._FULL_GRID", full_grid)
        keys.append(argmax_by_kernel(logits, *settings, 0, 8100))
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(keys[0], keys[2])


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("temperatures", [(0.0, 1.0), (0.5, 3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_equals_reference(dtype: torch.dtype, temperatures: tuple[float, float], device: torch.device) -> None:
    logits = torch.randn(2, 8100, device=device).to(dtype)
    settings = (torch.tensor(temperatures, device=device), *rows(2, 0.0, device)[1:])
    before = logits.clone()
    actual = argmax_by_kernel(logits, *settings, 1000, 8050)
    expected = argmax_by_reference(logits, *settings, 1000, 8050)
    assert torch.equal(token_ids_of(actual), token_ids_of(expected))
    torch.testing.assert_close(scores_of(actual), scores_of(expected), rtol=NOISE_ERROR, atol=NOISE_ERROR)
    assert torch.equal(logits, before)


def test_kernel_noise_equals_reference(device: torch.device) -> None:
    """At 60 quantiles of the noise, which take either way through the kernel's logarithm."""
    seeds = torch.arange(6000)
    noise = gumbel_noise(seeds, seeds, torch.tensor([77]))[:, 0]
    slots = noise.argsort()[50::100].to(torch.int32)
    keys = argmax_by_kernel(
        torch.zeros(60, 1, device=device), *(x.to(device) for x in (torch.ones(6000), seeds, seeds, slots)), 77, 1
    )
    torch.testing.assert_close(scores_of(keys).cpu(), noise[slots.long()], rtol=NOISE_ERROR, atol=NOISE_ERROR)


def test_noise_never_changes_between_versions() -> None:
    noise = gumbel_noise(torch.tensor([42, -1]), torch.tensor([0, 7]), torch.tensor([0, 1, 49151]))
    torch.testing.assert_close(
        noise, torch.tensor([[0.824105, 2.30743, 0.34058], [-0.164556, 1.107915, -0.209919]]), rtol=0, atol=2e-6
    )


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(torch.arange(20), torch.arange(20), torch.arange(50000))
    assert noise.isfinite().all()
    uniform = torch.exp(-torch.exp(-noise.double())).flatten().sort().values
    count = uniform.numel()
    # Kolmogorov and Smirnov's statistic exceeds this once in a thousand samples.
    distance = (uniform - (torch.arange(count) + 0.5) / count).abs().max()
    assert distance < 1.95 / count**0.5
    # The tail decides what is sampled: as many values above 10 as the distribution has, within four deviations.
    expected = count * (1 - torch.exp(-torch.exp(torch.tensor(-10.0, dtype=torch.float64))))
    assert abs((noise > 10).sum() - expected) < 4 * expected.sqrt()


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (torch.zeros(64, dtype=torch.int64), torch.arange(64)),
        (torch.arange(64), torch.zeros(64, dtype=torch.int64)),
        (torch.arange(64) << 32, torch.arange(64)),
        (torch.arange(64) * GOLDEN, 64 - torch.arange(64)),
    ],
    ids=["positions", "seeds", "high halves of seeds", "seeds that undo positions"],
)
def test_rows_are_independent(seeds: torch.Tensor, positions: torch.Tensor) -> None:
    noise = gumbel_noise(seeds, positions, torch.arange(20000))
    correlations = torch.corrcoef(noise).fill_diagonal_(0)
    # Of 2,016 pairs of independent rows, one is beyond five deviations once in nine hundred tries.
    assert correlations.abs().max() < 5 / 20000**0.5
    for lag in (1, 2, 64, 1024):
        assert torch.corrcoef(torch.stack((noise[:, lag:].flatten(), noise[:, :-lag].flatten())))[0, 1].abs() < 5e-3


def test_no_two_rows_are_equal() -> None:
    edges = torch.tensor([-(2**63), -(2**32), -2, -1, 0, 1, 2, 3, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, GOLDEN])
    seeds, positions = torch.cartesian_prod(edges, torch.arange(3000)).unbind(1)
    noise = gumbel_noise(seeds, positions, torch.arange(4))
    assert len(torch.unique(noise, dim=0)) == len(seeds)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vary", ["positions", "seeds"])
def test_samples_follow_the_softmax(temperature: float, vary: str) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -1.0, -2.0, -INF])
    draws = 20000
    counter, constant = torch.arange(draws), torch.full((draws,), 1234)
    seeds, positions = (constant, counter) if vary == "positions" else (counter, constant)
    temperatures = torch.full((draws,), temperature)
    many = logits.repeat(draws, 1)
    settings = temperatures, seeds, positions, counter, 0, 8, no_cutoffs(many), arrivals_for(many)
    keys = gumbel_argmax(many, *settings)
    counts = torch.bincount(token_ids_of(keys), minlength=8).double()
    expected = draws * (logits.double() / temperature).softmax(0)
    assert counts[7] == 0
    chi_square = ((counts - expected)[:7] ** 2 / expected[:7]).sum()
    assert chi_square < 27.86, "beyond the 0.9999 quantile of six degrees of freedom"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    logits = torch.randn(64, 151936, device=device).to(dtype)
    settings = rows(64, 0.8, device)
    settings[0][::2] = 0.0
    greedy = (settings[0] == 0.0)[settings[3].long()].cpu()
    cutoffs = no_cutoffs(logits)
    cutoffs[1::3] = 2.5
    actual = gumbel_argmax(logits, *settings, 0, 151900, cutoffs, arrivals_for(logits))
    expected = gumbel_argmax_reference(*(tensor.cpu() for tensor in (logits, *settings)), 0, 151900, cutoffs.cpu())
    assert torch.equal(actual.cpu()[greedy], expected[greedy])
    torch.testing.assert_close(scores_of(actual).cpu(), scores_of(expected), rtol=NOISE_ERROR, atol=NOISE_ERROR)
