"""Two attention kernels that benchmarks/prefill_attention.py measures the current ones against."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, scale: float, out: torch.Tensor) -> None:
    """What one writes first: causal attention of prompts of one length, one after the other in q, k and v.

    q, out: [T, H, D]. k, v: [T, K, D]. Every program takes 32 queries of one head, and keys 32 at a time.
    """
    heads, head_dim = q.shape[1:]
    grid = (triton.cdiv(length, 32), heads, q.shape[0] // length)
    _naive_kernel[grid](q, k, v, out, length, scale, heads, k.shape[1], head_dim, 32, num_stages=1)


@triton.jit
def _naive_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    begin = tl.program_id(2).to(tl.int64) * length
    queries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, HEAD_DIM)
    q_offsets = ((begin + queries) * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=(queries < length)[:, None], other=0.0)
    acc = tl.zeros((BLOCK, HEAD_DIM), dtype=tl.float32)
    row_max = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, tl.program_id(0) * BLOCK + BLOCK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        offsets = ((begin + keys) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + offsets, mask=(keys < length)[:, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=(keys < length)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(keys[None, :] <= queries[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_max[:, None])
        rescale = tl.exp(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v)
        row_max = new_max
    tl.store(out_ptr + q_offsets, acc / row_sum[:, None], mask=(queries < length)[:, None])


def earlier(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """This project's first paged kernel: 64 pairs of query and head a program, in a grid of rows by longest row.

    The arguments are those of `paged_prefill_attention`, with row r's table at block_tables[r].
    """
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    _earlier_kernel[(triton.cdiv(longest * group, 64), kv_heads, seq_lens.shape[0])](
        q, k_cache, v_cache, block_tables, seq_lens, query_start, out, scale * math.log2(math.e),
        block_tables.shape[1], group, kv_heads, block_size, head_dim, 64, 64, num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _earlier_loop(
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    q: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    limit: tl.tensor,
    scale_log2: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    dims = tl.arange(0, HEAD_DIM)
    for start in range(first, last, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        present = tokens < last
        if MASKED:
            blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=present, other=0)
        else:
            blocks = tl.load(table_ptr + tokens // BLOCK_SIZE)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        offsets = slots[:, None] * TOKEN_STRIDE + dims[None, :]
        if MASKED:
            k = tl.load(k_ptr + offsets, mask=present[:, None], other=0.0)
            v = tl.load(v_ptr + offsets, mask=present[:, None], other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        if MASKED:
            scores = tl.where(present[None, :] & (tokens[None, :] <= limit[:, None]), scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _earlier_kernel(
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_log2: tl.tensor,
    block_table_width: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    row = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    query_begin = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - query_begin
    first_pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first_pair >= query_len * GROUP:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    pairs = first_pair + tl.arange(0, BLOCK_M)
    query = tl.minimum(pairs // GROUP, query_len - 1)
    limit = seq_len - query_len + query
    last = tl.max(limit, axis=0) + 1
    last_seen_by_all = (tl.min(limit, axis=0) + 1) // BLOCK_N * BLOCK_N

    dims = tl.arange(0, HEAD_DIM)
    head = (query_begin + query).to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP + pairs % GROUP
    offsets = head[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + offsets)
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    table_ptr = block_tables_ptr + row * block_table_width
    acc = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    # fmt: off
    acc, row_max, row_sum = _earlier_loop(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, 0, last_seen_by_all, limit, scale_log2,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_N, False,
    )
    acc, row_max, row_sum = _earlier_loop(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, last_seen_by_all, last, limit, scale_log2,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_N, True,
    )
    # fmt: on
    tl.store(out_ptr + offsets, acc / row_sum[:, None], mask=(pairs < query_len * GROUP)[:, None])
