"""Drop unlikely tokens before sampling: top-k, top-p (nucleus, arXiv 1904.09751) and min-p (arXiv 2407.01082).

Each of the three keeps what lies at or above a threshold: the vocabulary need not be sorted, only thresholds found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_BLOCK = 8192


def filter_logits(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Set the logits of dropped tokens to -inf, in place, and return logits.

    top-k keeps the k largest logits and any equal to the k-th. Of these, top-p keeps the fewest likeliest whose share
    of their probability under softmax(logits / temperature) reaches top_p, and any equal to the last. min-p drops
    tokens less than min_p times as likely as the likeliest. The largest logit always stays. NaN counts as -inf.
    A row with nothing to filter keeps its bits: top_k 0 or at least V, top_p 1 and min_p 0; or temperature 0.

    logits: [S, V] float32, contiguous along V. temperature, top_p, min_p: [S] float32. top_k: [S] int32.
    """
    run = filter_logits_triton if logits.is_cuda else filter_logits_reference
    return run(logits, temperature, top_k, top_p, min_p)


def filter_logits_reference(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """`filter_logits` in plain PyTorch."""
    for row, t, k, p, low in zip(
        logits, temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True
    ):
        k = k if k < row.shape[0] else 0
        if t > 0 and (k > 0 or p < 1 or low > 0):
            _filter_row_(row, t, k, p, low)
    return logits


def _filter_row_(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    infinity = float("inf")
    row.nan_to_num_(nan=-infinity, posinf=infinity, neginf=-infinity)
    kept = row[row >= row.topk(top_k).values[-1]] if top_k > 0 else row
    if top_p < 1:
        kept = _nucleus(kept, temperature, top_p)
    if min_p > 0:
        kept = kept[_weights(kept, temperature) >= min_p]
    row.masked_fill_(row < kept.min(), -infinity)


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


def filter_logits_triton(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """`filter_logits` by a Triton kernel, one program a row."""
    num_rows, width = logits.shape
    block = min(triton.next_power_of_2(width), _MAX_BLOCK)
    _filter_kernel[(num_rows,)](logits, temperature, top_k, top_p, min_p, width, logits.stride(0), block, num_warps=32)
    return logits


@triton.jit
def _filter_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    width: tl.tensor,
    outer_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    limits_count = (top_k > 0) & (top_k < width)
    limits_mass = top_p < 1.0
    if (temperature <= 0.0) | ~(limits_count | limits_mass | (min_p > 0.0)):
        return
    row_ptr = logits_ptr + row * outer_stride
    peak = _peak(row_ptr, width, BLOCK)
    inverse_temperature = 1.0 / temperature
    threshold = float("-inf")
    if limits_count:
        target = top_k.to(tl.float32)
        threshold = _largest_threshold(row_ptr, width, threshold, target, peak, inverse_temperature, False, BLOCK)
    if limits_mass:
        target = top_p * _mass(row_ptr, width, threshold, peak, inverse_temperature, BLOCK)
        threshold = _largest_threshold(row_ptr, width, threshold, target, peak, inverse_temperature, True, BLOCK)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = _load(row_ptr, columns, width)
        kept = (logits >= threshold) & (_weight(logits, peak, inverse_temperature) >= min_p)
        tl.store(row_ptr + columns, tl.where(kept, logits, float("-inf")), mask=columns < width)


@triton.jit
def _largest_threshold(
    row_ptr: tl.tensor,
    width: tl.tensor,
    least: tl.tensor,
    target: tl.tensor,
    peak: tl.tensor,
    inverse_temperature: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the largest of float32 from least to peak at or above which the logits' count, or mass, reaches target.

    Searches the integers that order the floats; each pass over the row tries three of them and keeps a quarter.
    """
    low = _ordered(least).to(tl.int64)
    high = _ordered(peak).to(tl.int64)
    while low < high:
        quarter = (high - low + 4) // 4
        threshold_1 = _float_of(low + quarter)
        threshold_2 = _float_of(tl.minimum(low + 2 * quarter, high))
        threshold_3 = _float_of(tl.minimum(low + 3 * quarter, high))
        amount_1 = tl.zeros((BLOCK,), dtype=tl.float32)
        amount_2 = tl.zeros((BLOCK,), dtype=tl.float32)
        amount_3 = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            logits = _load(row_ptr, columns, width)
            amounts = _weight(logits, peak, inverse_temperature) if BY_MASS else tl.where(columns < width, 1.0, 0.0)
            amount_1 += tl.where(logits >= threshold_1, amounts, 0.0)
            amount_2 += tl.where(logits >= threshold_2, amounts, 0.0)
            amount_3 += tl.where(logits >= threshold_3, amounts, 0.0)
        reached = (tl.sum(amount_1, axis=0) >= target).to(tl.int64)
        reached += ((tl.sum(amount_2, axis=0) >= target) & (low + 2 * quarter <= high)).to(tl.int64)
        reached += ((tl.sum(amount_3, axis=0) >= target) & (low + 3 * quarter <= high)).to(tl.int64)
        low += quarter * reached
        high = tl.minimum(high, low + quarter - 1)
    return _float_of(low)


@triton.jit
def _mass(
    row_ptr: tl.tensor,
    width: tl.tensor,
    least: tl.tensor,
    peak: tl.tensor,
    inverse_temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the sum of the weights of logits at or above least."""
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        logits = _load(row_ptr, start + tl.arange(0, BLOCK), width)
        sums += tl.where(logits >= least, _weight(logits, peak, inverse_temperature), 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _peak(row_ptr: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    peaks = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        peaks = tl.maximum(peaks, _load(row_ptr, start + tl.arange(0, BLOCK), width))
    return tl.max(peaks, axis=0)


@triton.jit
def _load(row_ptr: tl.tensor, columns: tl.tensor, width: tl.tensor) -> tl.tensor:
    logits = tl.load(row_ptr + columns, mask=columns < width, other=float("-inf"))
    return tl.where(logits != logits, float("-inf"), logits)


@triton.jit
def _weight(logits: tl.tensor, peak: tl.tensor, inverse_temperature: tl.tensor) -> tl.tensor:
    """Return probabilities relative to the likeliest token's; infinite logits have no difference from an equal peak."""
    return tl.where(logits == peak, 1.0, tl.exp((logits - peak) * inverse_temperature))


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """Return an int32 that compares as the float32 x does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(ordered: tl.tensor) -> tl.tensor:
    """Return the float32 whose `_ordered` is the given int64."""
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
