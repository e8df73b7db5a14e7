"""The Triton kernels of `find_cutoffs` that search, one program a row: an interval, and in it the threshold."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.top_k_top_p_kernels import BOUNDS, TOTALS, fixed, limits, load, settings_of, weight


@triton.jit(do_not_specialize_on_alignment=["masses_ptr"])
def interval_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    width: tl.tensor,
    outer_stride: tl.tensor,
    tiles: tl.tensor,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
) -> None:
    """Join what `survey_kernel` found out about the tiles of a row, and choose the interval to collect."""
    row = tl.program_id(0).to(tl.int64)
    # Not after what the settings decide: their loads would be waited for first.
    columns = tl.arange(0, TILES)
    peaks = load(peaks_ptr + row * tiles, columns, tiles)
    masses = tl.load(masses_ptr + row * tiles + columns, mask=columns < tiles, other=0.0)
    temperature, top_k, top_p, min_p = settings_of(row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    limits_count, limits_mass, limited = limits(temperature, top_k, top_p, min_p, width)
    if ~limited:
        return
    inverse_temperature = 1.0 / temperature
    peak = tl.max(peaks, axis=0)
    masses *= weight(peaks, peak, inverse_temperature)
    low, high = float("-inf"), float("inf")
    # What fits anyway is collected whole.
    if (limits_count | limits_mass) & (width > CAPACITY) & (peak > float("-inf")):
        stride = (width + SAMPLE - 1) // SAMPLE
        row_ptr = logits_ptr + row * outer_stride
        sample = load(row_ptr, tl.arange(0, SAMPLE) * stride, width)
        if limits_count:
            low, high = _interval(sample, peak, inverse_temperature, top_k.to(tl.float32), stride, False)
            # A nucleus among the k largest is searched for among all of them.
            high = tl.where(limits_mass, float("inf"), high)
        else:
            rest = (1.0 - top_p) * tl.sum(masses, axis=0)
            low, high = _interval(sample, peak, inverse_temperature, rest, stride, True)
    bounds_ptr += row * BOUNDS
    tl.store(bounds_ptr, peak)
    tl.store(bounds_ptr + 1, low)
    tl.store(bounds_ptr + 2, high)
    totals_ptr += row * TOTALS
    for total in tl.static_range(4):
        tl.store(totals_ptr + total, 0)
    tl.store(totals_ptr + 4, tl.sum(fixed(masses), axis=0))


@triton.jit
def _interval(
    sample: tl.tensor,
    peak: tl.tensor,
    inverse_temperature: tl.tensor,
    amount: tl.tensor,
    stride: tl.tensor,
    BY_MASS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return low and high between which the threshold lies, very likely, by a sample of one logit in stride.

    The threshold has amount logits at or above it, or BY_MASS an amount of mass below it: there the sample errs little,
    for all weights are small. An amount of which the sample is expected to hold n (of the weight at the threshold) is
    given 4 sqrt(n) + 4 either way. The search is over the leading bits of the distance from the peak, which order it.
    Those for the near and the far end go side by side: a step waits for one sum of pairs.
    """
    distances = tl.where(sample == peak, 0.0, peak - sample).to(tl.int32, bitcast=True)
    weights = weight(sample, peak, inverse_temperature)
    near = tl.full((), 0, dtype=tl.int32)
    far, high_distance = near, near
    for step in range(16):
        near_try, far_try = near | (1 << (30 - step)), far | (1 << (30 - step))
        if BY_MASS:
            beyond = tl.join(tl.where(distances > near_try, weights, 0.0), tl.where(distances > far_try, weights, 0.0))
            near_amount, far_amount = tl.split(stride * tl.sum(beyond, axis=0))
            unit = stride * _weight_at(near_try, inverse_temperature)
            sure = near_amount >= amount + _margin(amount, unit)
            # Where the sample's weights are large beside the amount, nothing is sure, but it may be farther on.
            closer = sure | ((near_amount >= amount) & (8 * unit > amount))
            farther = far_amount > amount - _margin(amount, stride * _weight_at(far_try, inverse_temperature))
        else:
            within = tl.join(distances <= near_try, distances <= far_try).to(tl.int32)
            near_amount, far_amount = tl.split(stride * tl.sum(within, axis=0))
            margin = _margin(amount, 1.0 * stride)
            sure = near_amount < amount - margin
            closer = sure
            farther = far_amount < amount + margin
        high_distance = tl.where(sure, near_try, high_distance)
        near = tl.where(closer, near_try, near)
        far = tl.where(farther, far_try, far)
    high = tl.where(high_distance > 0, peak - high_distance.to(tl.float32, bitcast=True), float("inf"))
    # The step below the last bit tried. From the bits of infinity on, only logits of -inf are that far.
    far += 1 << 15
    low = tl.where(far < 0x7F800000, peak - far.to(tl.float32, bitcast=True), float("-inf"))
    return low, high


@triton.jit
def _weight_at(distance: tl.tensor, inverse_temperature: tl.tensor) -> tl.tensor:
    return tl.exp(-inverse_temperature * distance.to(tl.float32, bitcast=True))


@triton.jit
def _margin(amount: tl.tensor, unit: tl.tensor) -> tl.tensor:
    return 4.0 * tl.sqrt(amount * unit) + 4.0 * unit


@triton.jit
def search_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    cutoffs_ptr: tl.tensor,
    width: tl.tensor,
    outer_stride: tl.tensor,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHIFT: tl.constexpr,
) -> None:
    """Find the cutoff of one row. SHIFT: how many of a float32's last bits are zero in every logit."""
    row = tl.program_id(0).to(tl.int64)
    # Not after what the settings decide: their loads would be waited for first.
    candidates_ptr += row * CAPACITY
    first = load(candidates_ptr, _columns(BLOCK), CAPACITY)
    bounds_ptr += row * BOUNDS
    bounds = tl.load(bounds_ptr), tl.load(bounds_ptr + 1), tl.load(bounds_ptr + 2)
    totals_ptr += row * TOTALS
    inside = tl.load(totals_ptr), tl.load(totals_ptr + 1)
    above = tl.load(totals_ptr + 2), tl.load(totals_ptr + 3)
    row_mass = tl.load(totals_ptr + 4)
    temperature, top_k, top_p, min_p = settings_of(row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    limits_count, limits_mass, limited = limits(temperature, top_k, top_p, min_p, width)
    cutoff = tl.full((), float("-inf"), dtype=tl.float32)
    if limited:
        inverse_temperature = 1.0 / temperature
        if limits_count | limits_mass:
            cutoff = _threshold(
                first, candidates_ptr, logits_ptr + row * outer_stride, width, bounds, inside, above, row_mass,
                inverse_temperature, top_k, top_p, limits_count, limits_mass, BLOCK, CAPACITY, SHIFT,
            )  # fmt: skip
        if min_p > 0.0:
            cutoff = tl.maximum(cutoff, _least_likely(bounds[0], inverse_temperature, min_p, SHIFT))
    tl.store(cutoffs_ptr + row, cutoff)


@triton.jit
def _threshold(
    first: tl.tensor,
    candidates_ptr: tl.tensor,
    row_ptr: tl.tensor,
    width: tl.tensor,
    bounds: tl.tuple,
    inside: tl.tuple,
    above: tl.tuple,
    row_mass: tl.tensor,
    inverse_temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    limits_count: tl.tensor,
    limits_mass: tl.tensor,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """Return the threshold of top-k and top-p in one row, from among what was collected if that holds it.

    first: the first BLOCK places of the candidates. inside, above: number and mass of the logits in the interval, and
    of those above it.
    """
    peak, low, high = bounds
    count, mass = inside
    count_above, mass_above = above
    target_count, target_mass = top_k.to(tl.int64), _share(top_p, row_mass)
    if limits_count:
        held = (count_above < target_count) & (count_above + count >= target_count)
    else:
        held = (count_above == 0) | (mass_above < target_mass)
        held = held & (mass_above + mass >= target_mass)
    # An interval without bounds holds it too, if only because all logits above -inf stay.
    held = held | ((low == float("-inf")) & (count_above == 0))
    threshold = tl.where(held, low, float("-inf"))
    most = tl.minimum(tl.where(held, high, float("inf")), peak)
    if held & (count <= CAPACITY):
        first = tl.where(_columns(BLOCK) < count, first, float("-inf"))
        threshold = _search(
            first, candidates_ptr, count, threshold, most, target_count - count_above, target_mass, mass_above,
            peak, inverse_temperature, top_p, limits_count, limits_mass, BLOCK, SHIFT,
        )  # fmt: skip
    else:
        first = load(row_ptr, _columns(BLOCK), width)
        threshold = _search(
            first, row_ptr, count * 0 + width, threshold, most, target_count, target_mass, mass_above * 0,
            peak, inverse_temperature, top_p, limits_count, limits_mass, BLOCK, SHIFT,
        )  # fmt: skip
    return threshold


@triton.jit
def _search(
    first: tl.tensor,
    values_ptr: tl.tensor,
    count: tl.tensor,
    threshold: tl.tensor,
    most: tl.tensor,
    target_count: tl.tensor,
    target_mass: tl.tensor,
    mass_above: tl.tensor,
    peak: tl.tensor,
    inverse_temperature: tl.tensor,
    top_p: tl.tensor,
    limits_count: tl.tensor,
    limits_mass: tl.tensor,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """Return the threshold, from the given one to most, by values that with mass_above others make up the row.

    first: the first BLOCK of the values, -inf where there are fewer; the others are read in every pass.
    """
    if limits_count:
        threshold = _largest_threshold(
            first, values_ptr, count, threshold, most, target_count, peak, inverse_temperature, False, BLOCK, SHIFT
        )
        target_mass = _share(top_p, _mass(first, values_ptr, count, threshold, peak, inverse_temperature, BLOCK))
    if limits_mass:
        target_mass -= mass_above
        threshold = _largest_threshold(
            first, values_ptr, count, threshold, most, target_mass, peak, inverse_temperature, True, BLOCK, SHIFT
        )
    return threshold


@triton.jit
def _least_likely(peak: tl.tensor, inverse_temperature: tl.tensor, min_p: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the least float32, of those whose last SHIFT bits are zero, that is min_p times as likely as the peak.

    A pass tries 32, as many as a warp has threads.
    """
    low = _ordered(tl.full((), float("-inf"), dtype=tl.float32), SHIFT)
    high = _ordered(peak, SHIFT)
    places = tl.arange(0, 32)
    while low < high:
        part = (high - low + 31) // 32
        tries = tl.minimum(low + part * places, high)
        unlikely = weight(_float_of(tries, SHIFT), peak, inverse_temperature) < min_p
        count = tl.sum(unlikely.to(tl.int32), axis=0)
        low, high = tl.maximum(low + part * (count - 1) + 1, low), tl.minimum(low + part * count, high)
    return _float_of(low, SHIFT)


@triton.jit
def _largest_threshold(
    first: tl.tensor,
    values_ptr: tl.tensor,
    count: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    target: tl.tensor,
    peak: tl.tensor,
    inverse_temperature: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """Return the largest float32 from least to most at or above which the values' number, or mass, reaches target.

    Of those whose last SHIFT bits are zero, as a value's are; least where none reaches it, as sums of rounded masses
    may not. So least is rounded up: below it are logits that were not collected. The search is over the integers that
    order the floats; a pass over the values tries four of them and keeps a fifth.
    """
    low = -_ordered(-least, SHIFT)
    high = _ordered(most, SHIFT)
    columns = _columns(BLOCK)
    first_amounts = _amounts(first, columns < count, peak, inverse_temperature, BY_MASS)
    while low < high:
        part = (high - low + 5) // 5
        tries = tl.minimum(low + part * (1 + tl.arange(0, 4)[:, None]), high)
        thresholds = _float_of(tries, SHIFT)
        sums = tl.where(first >= thresholds, first_amounts, 0)
        for start in range(BLOCK, count, BLOCK):
            values = load(values_ptr, start + columns, count)
            amounts = _amounts(values, start + columns < count, peak, inverse_temperature, BY_MASS)
            sums += tl.where(values >= thresholds, amounts, 0)
        reached = tl.sum((tl.sum(sums, axis=1) >= target).to(tl.int32), axis=0)
        low = tl.minimum(low + part * reached, high)
        high = tl.minimum(high, low + part - 1)
    return _float_of(low, SHIFT)


@triton.jit
def _mass(
    first: tl.tensor,
    values_ptr: tl.tensor,
    count: tl.tensor,
    least: tl.tensor,
    peak: tl.tensor,
    inverse_temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the sum of the weights of values at or above least, as `fixed` has them."""
    columns = _columns(BLOCK)
    sums = tl.where(first >= least, _amounts(first, columns < count, peak, inverse_temperature, True), 0)
    for start in range(BLOCK, count, BLOCK):
        values = load(values_ptr, start + columns, count)
        amounts = _amounts(values, start + columns < count, peak, inverse_temperature, True)
        sums += tl.where(values >= least, amounts, 0)
    return tl.sum(sums)


@triton.jit
def _amounts(
    values: tl.tensor, real: tl.tensor, peak: tl.tensor, inverse_temperature: tl.tensor, BY_MASS: tl.constexpr
) -> tl.tensor:
    amounts = fixed(weight(values, peak, inverse_temperature)) if BY_MASS else tl.full(real.shape, 1, tl.int32)
    return tl.where(real, amounts, 0)


@triton.jit
def _columns(BLOCK: tl.constexpr) -> tl.tensor:
    """Return a row of them, [1, BLOCK]: thresholds are a column."""
    return tl.arange(0, BLOCK)[None, :]


@triton.jit
def _share(top_p: tl.tensor, mass: tl.tensor) -> tl.tensor:
    return (top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)


@triton.jit
def _ordered(x: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the place of the largest float32 not above x among those whose last SHIFT bits are zero.

    Places are integers in the order of the floats; both zeros have place 0.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    magnitude = magnitude.to(tl.int64) if SHIFT == 0 else magnitude  # else their differences are small
    return tl.where(bits < 0, -magnitude, magnitude) >> SHIFT


@triton.jit
def _float_of(place: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the float32 at a place of `_ordered`."""
    magnitude = (tl.abs(place) << SHIFT).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(place < 0, -magnitude, magnitude)
