"""The Triton kernels of `find_cutoffs` that read whole rows, several programs a row, and what they share."""

from __future__ import annotations

import triton
import triton.language as tl

BOUNDS = tl.constexpr(3)
"""A row's float32: its peak; the interval to collect, low then high."""
TOTALS = tl.constexpr(5)
"""A row's int64: number and mass of the logits in the interval, of those above it, and the mass of the row."""


@triton.jit(do_not_specialize_on_alignment=["masses_ptr"])
def survey_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    width: tl.tensor,
    outer_stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Peak of TILE columns of one row, and their mass relative to it."""
    row = tl.program_id(1).to(tl.int64)
    # Not after what the settings decide: their loads would be waited for first.
    row_ptr = logits_ptr + row * outer_stride
    logits = load(row_ptr, tl.program_id(0) * TILE + tl.arange(0, TILE), width)
    temperature, top_k, top_p, min_p = settings_of(row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    _, _, limited = limits(temperature, top_k, top_p, min_p, width)
    if ~limited:
        return
    peak = tl.max(logits, axis=0)
    part = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(peaks_ptr + part, peak)
    tl.store(masses_ptr + part, tl.sum(weight(logits, peak, 1.0 / temperature), axis=0))


@triton.jit
def collect_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    width: tl.tensor,
    outer_stride: tl.tensor,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    """Collect the logits of TILE columns of one row that lie in its interval, and add up these and those above."""
    row = tl.program_id(1).to(tl.int64)
    # Not after what the settings decide: their loads would be waited for first.
    row_ptr = logits_ptr + row * outer_stride
    logits = load(row_ptr, tl.program_id(0) * TILE + tl.arange(0, TILE), width)
    temperature, top_k, top_p, min_p = settings_of(row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    bounds_ptr += row * BOUNDS
    peak, low, high = tl.load(bounds_ptr), tl.load(bounds_ptr + 1), tl.load(bounds_ptr + 2)
    limits_count, limits_mass, limited = limits(temperature, top_k, top_p, min_p, width)
    if ~(limited & (limits_count | limits_mass)):
        return
    totals_ptr += row * TOTALS
    candidates_ptr += row * CAPACITY
    weights = weight(logits, peak, 1.0 / temperature)
    if high < float("inf"):
        above = logits > high
        tl.atomic_add(totals_ptr + 2, tl.sum(above.to(tl.int32), axis=0).to(tl.int64), sem="relaxed")
        tl.atomic_add(totals_ptr + 3, fixed(tl.sum(tl.where(above, weights, 0.0), axis=0)), sem="relaxed")
    inside = (logits >= low) & (logits <= high) & (logits > float("-inf"))
    count = tl.sum(inside.to(tl.int32), axis=0)
    if count > 0:
        start = tl.atomic_add(totals_ptr, count.to(tl.int64), sem="relaxed")
        tl.atomic_add(totals_ptr + 1, fixed(tl.sum(tl.where(inside, weights, 0.0), axis=0)), sem="relaxed")
        places = start + tl.cumsum(inside.to(tl.int32), axis=0) - 1
        tl.store(candidates_ptr + places, logits, mask=inside & (places < CAPACITY))


@triton.jit
def settings_of(
    index: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return temperature, top_k, top_p and min_p of a row; temperature 0, at which nothing is filtered, of padding."""
    slot = tl.load(slots_ptr + index).to(tl.int64)
    real = slot >= 0
    temperature, top_k = tl.load(temperature_ptr + slot, real, 0.0), tl.load(top_k_ptr + slot, real, 0)
    return temperature, top_k, tl.load(top_p_ptr + slot, real, 1.0), tl.load(min_p_ptr + slot, real, 0.0)


@triton.jit
def limits(
    temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, width: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return whether a row limits the number of tokens, or their mass, and whether it is filtered at all."""
    limits_count = (top_k > 0) & (top_k < width)
    limits_mass = top_p < 1.0
    return limits_count, limits_mass, (temperature > 0.0) & (limits_count | limits_mass | (min_p > 0.0))


@triton.jit
def load(values_ptr: tl.tensor, columns: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return the values of some columns in float32: -inf for NaN and from column count on."""
    values = tl.load(values_ptr + columns, mask=columns < count, other=float("-inf")).to(tl.float32)
    return tl.where(values != values, float("-inf"), values)


@triton.jit
def weight(logits: tl.tensor, peak: tl.tensor, inverse_temperature: tl.tensor) -> tl.tensor:
    """Return probabilities relative to the likeliest token's; infinite logits have no difference from an equal peak."""
    return tl.where(logits == peak, 1.0, tl.exp((logits - peak) * inverse_temperature))


@triton.jit
def fixed(mass: tl.tensor) -> tl.tensor:
    """Return a mass, a sum of weights below 2**22, as int64 units of 2**-40: their sums do not depend on the order."""
    return (mass * 1099511627776.0).to(tl.int64)
