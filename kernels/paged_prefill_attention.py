"""Causal attention of rows of several query tokens over the paged cache: prefill, chunked prefill, prefix hits."""

from __future__ import annotations

import torch
from torch.nn import functional

from paceline.kernels.paged_prefill_attention_hopper import fits_hopper_kernel, paged_prefill_attention_hopper
from paceline.kernels.paged_prefill_attention_triton import paged_prefill_attention_triton

_QUERIES_AT_ONCE = 1024
"""The reference takes a row's queries in chunks of this many, which bounds its mask."""


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    counter: torch.Tensor | None = None,
) -> None:
    """Write to out, [T, H, D], causal attention of the newest tokens of each row that has at least two of them.

    Row r owns tokens query_start[r] to query_start[r + 1], the last of its seq_lens[r] tokens: its query i stands at
    position seq_lens[r] - query_len + i and sees positions 0 to its own, through the block table
    block_tables[row_slots[r]]. Rows of one token (they are the decode kernel's) and of none (padding, whose slot is
    -1) are left as they are. Cache memory past a row's length and table entries past its last block have no
    influence, whatever they hold. On CUDA nothing here depends on values that the GPU holds, so that a CUDA graph can
    hold the call.

    q: [T, H, D], contiguous; this step's keys and values are stored already. k_cache, v_cache: [NB, BS, K, D],
    contiguous, of q's dtype, BS a power of two and H a multiple of K. block_tables: [S, B] int32, contiguous.
    row_slots, seq_lens: [R] int32. query_start: [R + 1] int32, starting with 0. scale is positive.
    counter: [1] int32, zero between kernels, for calls of which one runs after the other, as a step's do; without it a
    call on a Hopper GPU makes its own, by one more launch.
    """
    arguments = (q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, scale, out)
    if not q.is_cuda:
        paged_prefill_attention_reference(*arguments)
    elif fits_hopper_kernel(q, k_cache):
        paged_prefill_attention_hopper(*arguments, counter)
    else:
        paged_prefill_attention_triton(*arguments)


def paged_prefill_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`paged_prefill_attention` in plain PyTorch, for the CPU: on CUDA its float32 fused attention has errors."""
    starts = query_start.tolist()
    for row, (slot, seq_len) in enumerate(zip(row_slots.tolist(), seq_lens.tolist(), strict=True)):
        begin, end = starts[row], starts[row + 1]
        if end - begin < 2:
            continue
        keys = _row_entries(k_cache, block_tables[slot], seq_len)
        values = _row_entries(v_cache, block_tables[slot], seq_len)
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
