"""Drop unlikely tokens before sampling: top-k, top-p (nucleus, arXiv 1904.09751) and min-p (arXiv 2407.01082).

Each of the three keeps what lies at or above a threshold. So the vocabulary need not be sorted, and a row has one
cutoff, the largest of the three: logits stay as they are, and the draw (gumbel_argmax.py) passes over those below.
"""

from __future__ import annotations

import torch
import triton

from paceline.kernels.launch import launch
from paceline.kernels.top_k_top_p_kernels import BOUNDS, TOTALS, collect_kernel, survey_kernel
from paceline.kernels.top_k_top_p_search import interval_kernel, search_kernel

_TILE = 4096
_COLLECT_TILE = 2048
_SEARCH_BLOCK = 2048
_SAMPLE = 8192
_CAPACITY = 16384
"""Logits of a row among which its threshold is searched for; a sample of _SAMPLE promises that they suffice."""
_ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Last bits of a float32 that are zero in every value of a type, below which no threshold is searched for."""


def find_cutoffs(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Return the least logit that stays of each row, [R] float32; -inf where nothing is filtered.

    top-k keeps the k largest logits and any equal to the k-th. Of these, top-p keeps the fewest likeliest whose share
    of their probability under softmax(logits / temperature) reaches top_p, and any equal to the last. min-p drops
    tokens less than min_p times as likely as the likeliest. The largest logit always stays. NaN counts as -inf.
    Nothing is filtered with top_k 0 or at least V, top_p 1 and min_p 0; nor at temperature 0.

    logits: [R, V] float32, bfloat16 or float16, contiguous along V. slots: [R] int32 or int64; row r has the settings
    at slots[r], or is padding, of which nothing is filtered, where that is negative. temperature, top_p, min_p: [S]
    float32. top_k: [S] int32.
    """
    run = find_cutoffs_triton if logits.is_cuda else find_cutoffs_reference
    return run(logits, slots, temperature, top_k, top_p, min_p)


def find_cutoffs_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """`find_cutoffs` in plain PyTorch."""
    settings = list(zip(*(each.tolist() for each in (temperature, top_k, top_p, min_p)), strict=True))
    nothing = 0.0, 0, 1.0, 0.0
    cutoffs = [
        _cutoff(row.float(), *(settings[slot] if slot >= 0 else nothing))
        for row, slot in zip(logits, slots.tolist(), strict=True)
    ]
    return torch.tensor(cutoffs, dtype=torch.float32, device=logits.device)


def _cutoff(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    top_k = top_k if top_k < row.shape[0] else 0
    infinity = float("inf")
    if temperature <= 0 or not (top_k > 0 or top_p < 1 or min_p > 0):
        return -infinity
    row = row.nan_to_num(nan=-infinity, posinf=infinity, neginf=-infinity)
    kept = row[row >= row.topk(top_k).values[-1]] if top_k > 0 else row
    if top_p < 1:
        kept = _nucleus(kept, temperature, top_p)
    if min_p > 0:
        kept = kept[_weights(kept, temperature) >= min_p]
    return float(kept.min())


def _nucleus(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Return the fewest largest of logits [N] whose share of the probability reaches top_p."""
    weights = _weights(logits, temperature)
    total = weights.sum(dtype=torch.float64)
    # Tokens below a share of (1 - top_p) / N have less than 1 - top_p together: the few others hold the nucleus.
    candidates = logits[weights >= (1 - top_p) * total / logits.numel()].sort(descending=True).values
    mass = _weights(candidates, temperature).cumsum(0, dtype=torch.float64)
    last = torch.searchsorted(mass, top_p * total).clamp_(max=candidates.numel() - 1)
    return candidates[: last + 1]


def _weights(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return each token's probability relative to the likeliest one's."""
    peak = logits.max()
    # Infinite logits are equal to the peak but have no difference from it.
    return torch.where(logits == peak, 1.0, ((logits - peak) / temperature).exp_())


def find_cutoffs_triton(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """`find_cutoffs` by Triton kernels, of which two read the rows, several programs a row.

    The first of these finds each row's peak and mass; from a sample of the row comes an interval that very likely holds
    its threshold; the second collects the logits of the interval, among which the threshold is found. An interval that
    does not hold the threshold, or holds too many logits, is noticed: then the whole row is searched by one program.
    Masses of several programs add up as integers, so that a row's result depends neither on its batch nor on the
    programs' order.
    """
    num_rows, width = logits.shape
    tile = min(triton.next_power_of_2(width), _TILE)
    tiles = triton.cdiv(width, tile)
    capacity = min(width, _CAPACITY)
    device = logits.device
    peaks, masses = torch.empty((2, num_rows, tiles), dtype=torch.float32, device=device)
    bounds = torch.empty((num_rows, BOUNDS.value), dtype=torch.float32, device=device)
    totals = torch.empty((num_rows, TOTALS.value), dtype=torch.int64, device=device)
    candidates = torch.empty((num_rows, capacity), dtype=torch.float32, device=device)
    cutoffs = torch.empty(num_rows, dtype=torch.float32, device=device)
    what = (logits, slots, temperature, top_k, top_p, min_p)
    stride = logits.stride(0)
    launch(survey_kernel, (tiles, num_rows), *what, peaks, masses, width, stride, TILE=tile, num_warps=8)
    launch(
        interval_kernel,
        (num_rows,),
        *what, peaks, masses, bounds, totals, width, stride, tiles,
        TILES=triton.next_power_of_2(tiles), CAPACITY=capacity, SAMPLE=_SAMPLE, num_warps=4,
    )  # fmt: skip
    collect_tile = min(tile, _COLLECT_TILE)
    launch(
        collect_kernel,
        (triton.cdiv(width, collect_tile), num_rows),
        *what, bounds, totals, candidates, width, stride,
        TILE=collect_tile, CAPACITY=capacity, num_warps=8,
    )  # fmt: skip
    launch(
        search_kernel,
        (num_rows,),
        *what, bounds, totals, candidates, cutoffs, width, stride,
        BLOCK=_SEARCH_BLOCK, CAPACITY=capacity, SHIFT=_ZERO_BITS[logits.dtype], num_warps=8,
    )  # fmt: skip
    return cutoffs
