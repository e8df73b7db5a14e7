"""Causal attention of rows of several query tokens over the paged cache: prefill, chunked prefill, prefix hits."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.nn import functional

from paceline.kernels.paged_attention_inner import attend

_QUERIES_AT_ONCE = 1024
"""The reference takes a row's queries in chunks of this many, which bounds its mask."""
_BLOCK_M = 64


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of each row's newest tokens over all of its tokens: [T, H, D], in out if given.

    Row r owns tokens query_start[r] to query_start[r + 1], the last of its seq_lens[r] tokens: its query i stands at
    position seq_lens[r] - query_len + i and sees positions 0 to its own. Tokens of no row get no result.
    Cache memory past a row's length and table entries past its last block have no influence, whatever they hold.

    q: [T, H, D], contiguous; this step's keys and values are stored already. k_cache, v_cache: [NB, BS, K, D],
    contiguous, of q's dtype, BS a power of two and H a multiple of K. block_tables: [R, B] int32, contiguous.
    seq_lens: [R] int32.
    query_start: [R + 1] int32. No row has more than max_query_len queries.
    """
    out = torch.empty_like(q) if out is None else out
    if q.is_cuda:
        paged_prefill_attention_triton(
            q, k_cache, v_cache, block_tables, seq_lens, query_start, max_query_len, scale, out
        )
    else:
        paged_prefill_attention_reference(q, k_cache, v_cache, block_tables, seq_lens, query_start, scale, out)
    return out


def paged_prefill_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`paged_prefill_attention` in plain PyTorch."""
    starts = query_start.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        keys = _row_entries(k_cache, block_tables[row], seq_len)
        values = _row_entries(v_cache, block_tables[row], seq_len)
        for start in range(begin, end, _QUERIES_AT_ONCE):
            stop = min(start + _QUERIES_AT_ONCE, end)
            visible = seq_len - (end - stop)
            out[start:stop] = _causal_attention(q[start:stop], keys[:visible], values[:visible], scale)


def _row_entries(cache: torch.Tensor, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Return the cache entries of a row's blocks, [L, K, D], of which the first seq_len are its own."""
    block_size, kv_heads, head_dim = cache.shape[1:]
    blocks = cache.index_select(0, block_table[: -(-seq_len // block_size)])
    return blocks.view(-1, kv_heads, head_dim)


def _causal_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend from q [T, H, D], the last T of L tokens, to keys and values [L, K, D]; return [T, H, D]."""
    (num_queries, num_heads, head_dim), (num_keys, kv_heads) = q.shape, keys.shape[:2]
    group = num_heads // kv_heads
    # KV heads become the batch, and the query heads of a group its heads: nothing is repeated in memory.
    queries = q.view(num_queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys, values = (x.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (keys, values))
    mask = None
    if num_queries < num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril_(num_keys - num_queries)
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return attended.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def paged_prefill_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`paged_prefill_attention` by a Triton kernel."""
    num_heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    group = num_heads // kv_heads
    block_d = triton.next_power_of_2(head_dim)
    # Every stage holds a tile of keys and one of values in shared memory.
    block_n, num_stages = (64, 3) if block_d * q.element_size() <= 512 else (32, 1)
    _prefill_kernel[(triton.cdiv(max_query_len * group, _BLOCK_M), kv_heads, seq_lens.shape[0])](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        query_start,
        out,
        scale * math.log2(math.e),
        block_tables.shape[1],
        group,
        kv_heads,
        block_size,
        head_dim,
        _BLOCK_M,
        block_d,
        block_n,
        not q.is_cuda,
        num_warps=4,
        num_stages=num_stages,
    )


@triton.jit(do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "query_start_ptr"])
def _prefill_kernel(
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
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """BLOCK_M pairs of (query token, query head of the group) of one row and KV head, heads running fastest."""
    row = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    query_begin = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - query_begin
    # The last queries see the most tokens; they start first, so that none of them is left over at the end.
    first_pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first_pair >= query_len * GROUP:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    pairs = first_pair + tl.arange(0, BLOCK_M)
    # Pairs past the end stand in for the last query, and are not stored.
    query = tl.minimum(pairs // GROUP, query_len - 1)
    limit = seq_len - query_len + query
    last = tl.max(limit, axis=0) + 1
    last_seen_by_all = (tl.min(limit, axis=0) + 1) // BLOCK_N * BLOCK_N

    dims = tl.arange(0, BLOCK_D)
    head = (query_begin + query).to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP + pairs % GROUP
    offsets = head[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    table_ptr = block_tables_ptr + row * block_table_width
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    # fmt: off
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, 0, last_seen_by_all, limit, scale_log2,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, False, UPCAST,
    )
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, last_seen_by_all, last, limit, scale_log2,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, True, UPCAST,
    )
    # fmt: on
    mask = (pairs < query_len * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + offsets, acc / row_sum[:, None], mask=mask)
