"""Attention of one query token a row over that row's keys and values in the paged cache.

The kernel takes a group of query heads that share a KV head as one matrix, and shares a row's tokens among several
programs where there are too few rows to fill the GPU (Flash-Decoding, https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch.nn import functional

from paceline.kernels.paged_attention_inner import attend

_GATHER_BYTES = 2 << 20
"""The reference gathers the keys of as many rows at a time as make this much: about a core's share of the cache."""
_BLOCK_N = 64
_MAX_SPLITS = 64


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q @ keys) @ values over each row's first seq_lens[r] tokens: [R, H, D], in out if given.

    Cache memory past a row's length and table entries past its last block have no influence, whatever they hold.

    q: [R, H, D], contiguous, each row's newest token (its key and value are stored already). k_cache, v_cache:
    [NB, BS, K, D], contiguous, of q's dtype, BS a power of two and H a multiple of K; query head h reads KV head
    h // (H / K). block_tables: [R, B] int32, contiguous. seq_lens: [R] int32, from 1 to max_seq_len (on CUDA also 0: a
    padding row, whose result is zero).
    """
    out = torch.empty_like(q) if out is None else out
    if q.is_cuda:
        splits = _num_splits(q.shape[0] * k_cache.shape[2], max_seq_len, _num_processors(q.device))
        paged_decode_attention_triton(q, k_cache, v_cache, block_tables, seq_lens, scale, splits, out)
    else:
        paged_decode_attention_reference(q, k_cache, v_cache, block_tables, seq_lens, scale, out)
    return out


def paged_decode_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`paged_decode_attention` in plain PyTorch."""
    num_rows, num_heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    shortest, longest = (int(length) for length in seq_lens.aminmax())
    # Positions past a row's end repeat its last token and are masked, so that nothing undefined is ever read.
    position = torch.arange(longest, device=q.device)
    own = torch.minimum(position, seq_lens.unsqueeze(1) - 1)
    slots = block_tables.gather(1, own // block_size).long() * block_size + own % block_size
    mask = None if shortest == longest else (position < seq_lens.unsqueeze(1))[:, None, None]

    group = num_heads // kv_heads
    rows_at_once = max(1, _GATHER_BYTES // (longest * kv_heads * head_dim * k_cache.element_size()))
    for start in range(0, num_rows, rows_at_once):
        rows = slice(start, start + rows_at_once)
        attended = functional.scaled_dot_product_attention(
            q[rows].view(-1, kv_heads, group, head_dim),
            _gather(k_cache, slots[rows]),
            _gather(v_cache, slots[rows]),
            attn_mask=None if mask is None else mask[rows],
            scale=scale,
        )
        out[rows] = attended.reshape(-1, num_heads, head_dim)


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the cache entries at slots [R, L] as [R, K, L, D]."""
    kv_heads, head_dim = cache.shape[2:]
    entries = cache.view(-1, kv_heads * head_dim).index_select(0, slots.flatten())
    return entries.view(*slots.shape, kv_heads, head_dim).transpose(1, 2)


def paged_decode_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    splits: int,
    out: torch.Tensor,
) -> None:
    """`paged_decode_attention` by Triton kernels, each row's tokens shared among `splits` programs, a power of two."""
    num_rows, num_heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    block_d = triton.next_power_of_2(head_dim)
    group = num_heads // kv_heads
    partial, log_sums = out, None
    if splits > 1:
        partial = torch.empty((num_rows, num_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty((num_rows, num_heads, splits), dtype=torch.float32, device=q.device)
    _decode_kernel[(num_rows, kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        partial,
        log_sums,
        scale * math.log2(math.e),
        block_tables.shape[1],
        group,
        kv_heads,
        block_size,
        head_dim,
        max(16, triton.next_power_of_2(group)),
        block_d,
        _BLOCK_N,
        splits,
        not q.is_cuda,
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        _combine_kernel[(num_rows, num_heads)](
            partial, log_sums, out, num_heads, head_dim, block_d, splits, num_warps=4
        )


@functools.cache
def _num_processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _num_splits(num_programs: int, max_seq_len: int, num_processors: int) -> int:
    """Return among how many programs to share each row's tokens: enough to occupy the GPU twice, none too short."""
    to_occupy = -(-2 * num_processors // num_programs)
    worthwhile = max(1, max_seq_len // _BLOCK_N)
    return min(1 << (min(to_occupy, worthwhile) - 1).bit_length(), _MAX_SPLITS)


@triton.jit(do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr"])
def _decode_kernel(
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    scale_log2: tl.tensor,
    block_table_width: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One row, one KV head with its GROUP query heads, one share of the row's tokens.

    SPLITS 1: writes the result, [R, H, D], to out. Otherwise writes the share's result to out, [R, H, SPLITS, D]
    float32, and the base-2 logarithm of its softmax denominator to log_sums, [R, H, SPLITS]; -inf if it is empty.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + row)
    tokens_per_split = tl.cdiv(tl.cdiv(seq_len, SPLITS), BLOCK_N) * BLOCK_N
    first = tl.minimum(split * tokens_per_split, seq_len)
    last = tl.minimum(first + tokens_per_split, seq_len)
    last_whole = first + (last - first) // BLOCK_N * BLOCK_N

    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    head = row * KV_HEADS * GROUP + kv_head * GROUP + members
    q = tl.load(q_ptr + head[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    table_ptr = block_tables_ptr + row * block_table_width
    limit = tl.zeros((BLOCK_M,), dtype=tl.int32) + seq_len
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    # fmt: off
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, first, last_whole, limit, scale_log2,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, False, UPCAST,
    )
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, last_whole, last, limit, scale_log2,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, True, UPCAST,
    )
    # fmt: on
    denominator = tl.where(row_sum > 0, row_sum, 1.0)  # An empty share has no weights.
    result = acc / denominator[:, None]
    if SPLITS == 1:
        tl.store(out_ptr + head[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
    else:
        share = head * SPLITS + split
        tl.store(out_ptr + share[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
        tl.store(log_sums_ptr + share, row_max + tl.log2(denominator), mask=members < GROUP)


@triton.jit
def _combine_kernel(
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Average the shares of one row and query head, weighted by their softmax denominators."""
    head = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    share = head * SPLITS + tl.arange(0, SPLITS)
    dims = tl.arange(0, BLOCK_D)
    log_sums = tl.load(log_sums_ptr + share)
    largest = tl.max(log_sums, axis=0)
    weights = tl.where(log_sums == float("-inf"), 0.0, tl.exp2(log_sums - largest))
    total = tl.sum(weights, axis=0)
    partial = tl.load(
        partial_ptr + share[:, None] * HEAD_DIM + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0
    )
    result = tl.sum(partial * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + head * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)
