"""Sampling as an argmax of logits plus temperature times Gumbel noise (Maddison et al., arXiv 1411.0030).

The noise is that of `gumbel_noise`, the same for a token wherever and in whatever company it is drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.gumbel_noise import gumbel_noise, log2_exponential_triton, row_key_triton
from paceline.kernels.launch import launch

_MAX_TOKEN_ID = 2**31 - 1
_NO_TOKEN_KEY = -(2**63)
"""Less than the key of any token, also of one whose logit is -inf."""
_BLOCK = 1024
_MAX_STEPS = 16
_FULL_GRID = 2560
"""Programs that keep a large GPU busy to the end; more columns than these take make the programs longer."""
_NOISE_AT_ONCE = 1 << 16
"""The reference draws noise for as many rows at a time as have this many tokens, which a core's cache holds."""


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    vocab_start: int,
    vocab_valid: int,
    cutoffs: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    as_token_ids: bool = False,
) -> torch.Tensor:
    """Return each row's winner among one shard of the vocabulary, as a key that compares like its score: [R] int64.

    A token's score is its logit, in float32, plus temperature * Gumbel noise; at temperature 0 it is the logit
    itself. NaN counts as -inf. The largest of all shards' keys is that of the winner in the whole vocabulary, the
    lowest id among equal scores: reduce keys with an elementwise int64 maximum, and read the ids with `token_ids_of`.
    as_token_ids: where there is one shard alone, return these at once.

    logits: [R, V] float32, bfloat16 or float16, contiguous; column c is token vocab_start + c, and columns from
    vocab_valid on are padding, never chosen. slots: [R] int32 or int64; row r has the settings at slots[r], or is
    padding itself where that is negative: then its key is less than any token's. temperature: [S] float32. seeds: [S]
    int64. positions: [S] int32 or int64, those of the tokens to draw. cutoffs: [R or more] float32, of each row the
    least logit that may win, not above the largest.

    arrivals: [R or more] int32, zero before the first call and again after each. Calls that share it must follow each
    other, as they do on one stream.
    """
    what = logits, temperature, seeds, positions, slots, vocab_start, vocab_valid, cutoffs
    if logits.is_cuda:
        return gumbel_argmax_triton(*what, arrivals, as_token_ids=as_token_ids)
    keys = gumbel_argmax_reference(*what)
    return token_ids_of(keys) if as_token_ids else keys


def token_ids_of(keys: torch.Tensor) -> torch.Tensor:
    """Return the token ids, int64, in keys of `gumbel_argmax`."""
    return _MAX_TOKEN_ID - (keys & _MAX_TOKEN_ID)


def gumbel_argmax_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    vocab_start: int,
    vocab_valid: int,
    cutoffs: torch.Tensor,
) -> torch.Tensor:
    """`gumbel_argmax` in plain PyTorch."""
    if vocab_valid == 0:
        return torch.full(slots.shape, _NO_TOKEN_KEY, device=logits.device)
    padding = slots < 0
    slots = slots.long().clamp(min=0)
    temperature = temperature[slots].masked_fill_(padding, 0.0)
    infinity = float("inf")
    scores = torch.nan_to_num(logits[:, :vocab_valid].float(), nan=-infinity, posinf=infinity, neginf=-infinity)
    least = cutoffs[: scores.shape[0], None]
    if (least > -infinity).any():
        scores.masked_fill_(scores < least, -infinity)
    token_ids = torch.arange(vocab_start, vocab_start + vocab_valid, device=logits.device)
    sampled = temperature.nonzero().flatten()
    rows_at_once = max(1, _NOISE_AT_ONCE // vocab_valid)
    for start in range(0, sampled.numel(), rows_at_once):
        rows = sampled[start : start + rows_at_once]
        noise = gumbel_noise(seeds[slots[rows]], positions[slots[rows]], token_ids)
        scores.index_add_(0, rows, noise.mul_(temperature[rows].unsqueeze(1)))
    best, column = scores.max(dim=-1)
    keys = (_ordered_int32(best).long() << 32) | (_MAX_TOKEN_ID - vocab_start - column)
    return keys.masked_fill_(padding, _NO_TOKEN_KEY)


def _ordered_int32(x: torch.Tensor) -> torch.Tensor:
    """Return int32 that compare as the float32 x do; adding zero makes -0.0 and 0.0 one."""
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def gumbel_argmax_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    vocab_start: int,
    vocab_valid: int,
    cutoffs: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    as_token_ids: bool = False,
) -> torch.Tensor:
    """`gumbel_argmax` by one launch of a Triton kernel, several programs a row; the last of a row ends it."""
    num_rows, width = logits.shape
    blocks = triton.cdiv(width, _BLOCK)
    steps = min(_MAX_STEPS, triton.next_power_of_2(triton.cdiv(num_rows * blocks, _FULL_GRID)))
    tiles = triton.cdiv(blocks, steps)
    winners = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    partial_keys = torch.empty((num_rows, tiles), dtype=torch.int64, device=logits.device)
    launch(
        _gumbel_argmax_kernel,
        (num_rows, tiles),
        logits,
        temperature,
        seeds,
        positions,
        slots,
        cutoffs,
        partial_keys,
        arrivals,
        winners,
        width,
        vocab_start,
        vocab_valid,
        BLOCK=_BLOCK,
        STEPS=steps,
        TILES=triton.next_power_of_2(tiles),
        TOKEN_IDS=as_token_ids,
        ON_GPU=logits.is_cuda,
        num_warps=4,
    )
    return winners


@triton.jit(do_not_specialize=["vocab_start"])
def _gumbel_argmax_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cutoffs_ptr: tl.tensor,
    partial_keys_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    winners_ptr: tl.tensor,
    width: tl.tensor,
    vocab_start: tl.tensor,
    vocab_valid: tl.tensor,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
    TOKEN_IDS: tl.constexpr,
    ON_GPU: tl.constexpr,
) -> None:
    """STEPS times BLOCK columns of one row; the program that ends last of a row joins what they found."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        tl.store(winners_ptr + row, 0x7FFFFFFF if TOKEN_IDS else -0x8000000000000000)
        return
    first = tile * (BLOCK * STEPS)
    row_ptr = logits_ptr + row * width + first
    valid = vocab_valid - first
    temperature = tl.load(temperature_ptr + slot)
    row_key = row_key_triton(tl.load(seeds_ptr + slot), tl.load(positions_ptr + slot))
    first_token = vocab_start + first
    if temperature > 0:
        cutoff = tl.load(cutoffs_ptr + row)
        score, column = _best(row_ptr, valid, first_token, row_key, temperature, cutoff, True, BLOCK, STEPS, ON_GPU)
    else:
        # The largest logit wins, which no cutoff excludes.
        score, column = _best(row_ptr, valid, first_token, row_key, temperature, 0.0, False, BLOCK, STEPS, ON_GPU)
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - first_token - column).to(tl.int64)
    key = tl.where(column < valid, key, -0x8000000000000000)
    tiles = tl.num_programs(1)
    tl.store(partial_keys_ptr + row * tiles + tile, key)
    # Releases this program's key, and acquires those of the programs that came before.
    if tl.atomic_add(arrivals_ptr + row, 1) == tiles - 1:
        others = tl.arange(0, TILES)
        partial_keys = tl.load(
            partial_keys_ptr + row * tiles + others,
            mask=others < tiles,
            other=-0x8000000000000000,
            cache_modifier=".cg",
        )
        winner = tl.max(partial_keys, axis=0)
        if TOKEN_IDS:
            winner = 0x7FFFFFFF - (winner & 0x7FFFFFFF)
        tl.store(winners_ptr + row, winner)
        tl.store(arrivals_ptr + row, 0)


@triton.jit
def _best(
    row_ptr: tl.tensor,
    valid: tl.tensor,
    first_token: tl.tensor,
    row_key: tl.tensor,
    temperature: tl.tensor,
    cutoff: tl.tensor,
    NOISY: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    ON_GPU: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the best score among STEPS * BLOCK columns and the first column that has it; NOISY: above a cutoff.

    Each lane keeps its best score and the step that it came from; only the end compares lanes.
    """
    lanes = tl.arange(0, BLOCK)
    scale = temperature * -0.6931471805599453
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    best_step = tl.zeros((BLOCK,), dtype=tl.int32)
    low, high = row_key.to(tl.uint32), (row_key >> 32).to(tl.uint32)
    counters = lanes.to(tl.uint32) + (low + first_token.to(tl.uint32))
    for step in range(STEPS):
        column = step * BLOCK
        scores = tl.load(row_ptr + column + lanes, mask=lanes < valid - column, other=float("-inf")).to(tl.float32)
        if NOISY:
            scores = tl.where(scores >= cutoff, scores, float("-inf"))
            scores += scale * log2_exponential_triton(counters, low, high, ON_GPU)
            counters += BLOCK
        # False of NaN, and of equal scores, of which the first counts.
        better = scores > best
        best = tl.where(better, scores, best)
        best_step = tl.where(better, step, best_step)
    score = tl.max(best, axis=0)
    columns = best_step * BLOCK + lanes
    return score, tl.min(tl.where(best == score, columns, 0x7FFFFFFF), axis=0)
