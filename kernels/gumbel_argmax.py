"""Sampling as an argmax of logits plus temperature times Gumbel noise (Maddison et al., arXiv 1411.0030).

The noise is counter-based, a pure function of (request seed, position, token id), so that a seeded request draws the
same tokens whatever its batch, the number of ranks or the order of steps. A 64-bit row key comes from seed and
position by the finaliser of SplitMix64 (Steele et al., OOPSLA 2014), a token's 32 bits from two rounds of lowbias32
(https://nullprogram.com/blog/2018/07/31/), each keyed with one half of the row key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_TOKEN_ID = 2**31 - 1
_NO_TOKEN_KEY = -(2**63)
"""Less than the key of any token, also of one whose logit is -inf."""
_BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1."""
_BLOCK = 2048
_NOISE_AT_ONCE = 1 << 16
"""The reference draws noise for as many rows at a time as have this many tokens, which a core's cache holds."""


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int,
    vocab_valid: int,
) -> torch.Tensor:
    """Return each row's winner among one shard of the vocabulary, as a key that compares like its score: [S] int64.

    A token's score is its logit, in float32, plus temperature * Gumbel noise; at temperature 0 it is the logit
    itself. NaN counts as -inf. The largest of all shards' keys is that of the winner in the whole vocabulary, the
    lowest id among equal scores: reduce keys with an elementwise int64 maximum, and read the ids with `token_ids_of`.

    logits: [S, V] float32, bfloat16 or float16, contiguous; column c is token vocab_start + c, and columns from
    vocab_valid on are padding, never chosen. temperature: [S] float32. seeds: [S] int64. positions: [S] int32 or
    int64, those of the tokens to draw.
    """
    run = gumbel_argmax_triton if logits.is_cuda else gumbel_argmax_reference
    return run(logits, temperature, seeds, positions, vocab_start, vocab_valid)


def token_ids_of(keys: torch.Tensor) -> torch.Tensor:
    """Return the token ids, int64, in keys of `gumbel_argmax`."""
    return _MAX_TOKEN_ID - (keys & _MAX_TOKEN_ID)


def gumbel_argmax_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int,
    vocab_valid: int,
) -> torch.Tensor:
    """`gumbel_argmax` in plain PyTorch."""
    if vocab_valid == 0:
        return torch.full_like(seeds, _NO_TOKEN_KEY)
    infinity = float("inf")
    scores = torch.nan_to_num(logits[:, :vocab_valid].float(), nan=-infinity, posinf=infinity, neginf=-infinity)
    token_ids = torch.arange(vocab_start, vocab_start + vocab_valid, dtype=torch.int32, device=logits.device)
    sampled = temperature.nonzero().flatten()
    rows_at_once = max(1, _NOISE_AT_ONCE // vocab_valid)
    for start in range(0, sampled.numel(), rows_at_once):
        rows = sampled[start : start + rows_at_once]
        noise = gumbel_noise(seeds[rows], positions[rows], token_ids)
        scores.index_add_(0, rows, noise.mul_(temperature[rows].unsqueeze(1)))
    best, column = scores.max(dim=-1)
    return (_ordered_int32(best).long() << 32) | (_MAX_TOKEN_ID - vocab_start - column)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the standard Gumbel noise of every row and token: [S, N] float32.

    seeds: [S] int64. positions: [S] int32 or int64. token_ids: [N] int32 or int64.
    """
    row_key = _mix64(_mix64(seeds) + positions.long() * _signed(0x9E3779B97F4A7C15, 64)).unsqueeze(1)
    low, high = row_key.to(torch.int32), (row_key >> 32).to(torch.int32)
    bits = _mix32_(_mix32_(token_ids.to(torch.int32) ^ low).bitwise_xor_(high))
    # Large noise, which decides, comes of small v, where float32 is finest; rounding up to 1 would give -inf.
    v = bits.view(torch.uint32).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    exponential = v.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _ordered_int32(x: torch.Tensor) -> torch.Tensor:
    """Return int32 that compare as the float32 x do; adding zero makes -0.0 and 0.0 one."""
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _signed(constant: int, bits: int) -> int:
    """Return an unsigned constant as the signed integer of the same bits: torch's shifts and products need those."""
    return constant - (1 << bits) if constant >> (bits - 1) else constant


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 of int32 x, in place; the masks make arithmetic shifts logical."""
    x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15) & 0x1FFFF).mul_(_signed(0x846CA68B, 32))
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser of int64 x; the masks make arithmetic shifts logical."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & (2**33 - 1))


def gumbel_argmax_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int,
    vocab_valid: int,
) -> torch.Tensor:
    """`gumbel_argmax` by a Triton kernel, which finds the winner of every _BLOCK columns."""
    num_rows, width = logits.shape
    tiles = triton.cdiv(width, _BLOCK)
    keys = torch.empty((num_rows, tiles), dtype=torch.int64, device=logits.device)
    _gumbel_argmax_kernel[(num_rows, tiles)](
        logits, temperature, seeds, positions, keys, width, vocab_start, vocab_valid, _BLOCK, num_warps=8
    )
    return keys.amax(dim=1)


@triton.jit(do_not_specialize=["vocab_start", "vocab_valid"])
def _gumbel_argmax_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    width: tl.tensor,
    vocab_start: tl.tensor,
    vocab_valid: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < vocab_valid
    token_ids = vocab_start + columns
    scores = tl.load(logits_ptr + row * width + columns, mask=real, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores != scores, float("-inf"), scores)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        scores += temperature * _noise(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), token_ids)
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token_ids).to(tl.int64)
    keys = tl.where(real, keys, -0x8000000000000000)
    tl.store(keys_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(keys, axis=0))


@triton.jit
def _noise(seed: tl.tensor, position: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """`gumbel_noise` of one row."""
    row_key = _mix64_triton(_mix64_triton(seed.to(tl.uint64)) + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    bits = _mix32_triton(token_ids.to(tl.uint32) ^ row_key.to(tl.uint32))
    bits = _mix32_triton(bits ^ (row_key >> 32).to(tl.uint32))
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    # log1p(-v): the quotient undoes the rounding of 1 - v (Kahan, in the HP-15C Advanced Functions Handbook).
    rest = 1.0 - v
    exponential = tl.where(rest == 1.0, v, -tl.log(rest) * (v / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(exponential)


@triton.jit
def _mix32_triton(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _mix64_triton(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
