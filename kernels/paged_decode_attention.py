"""Attention of rows with one query token over their keys and values in the paged cache.

Query heads that share a KV head are taken as one matrix. Long rows are cut into chunks, as in Flash-Decoding
(https://pytorch.org/blog/flash-decoding/), which decode_work deals out; the program that finishes a row's last chunk
puts the row's results together, so that no second kernel is needed.
"""

from __future__ import annotations

import math

import torch
import triton
from torch.nn import functional

from paceline.kernels.decode_work import BLOCK_N, DecodeWork, plan_decode
from paceline.kernels.launch import dependent_launch, launch
from paceline.kernels.paged_decode_attention_hopper import fits_hopper_decode, paged_decode_attention_hopper
from paceline.kernels.paged_decode_kernel import COMBINED_AT_ONCE, decode_kernel

_GATHER_BYTES = 2 << 20
"""The reference gathers the keys of as many rows at a time as make this much: about a core's share of the cache."""


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    work: DecodeWork | None = None,
) -> None:
    """Write softmax(scale * q @ keys) @ values to out for the rows that have one query token; leave others alone.

    Row r's token is query_start[r] of the T; it is the newest of its seq_lens[r] tokens, whose keys and values are
    stored already, in the blocks of block_tables[row_slots[r]]. Cache memory past a row's length and table entries
    past its last block have no influence, whatever they hold. Padding rows have no token, and any slot.

    q, out: [T, H, D], contiguous. k_cache, v_cache: [NB, BS, K, D], contiguous, of q's dtype, BS a power of two and H a
    multiple of K; query head h reads KV head h // (H / K). block_tables: [S, B] int32, contiguous. row_slots: [R]
    int32. query_start: [R + 1] int32. seq_lens: [R] int32.
    work: `plan_decode` of the same rows, which a step makes once for all layers; the CPU needs none.
    """
    if q.is_cuda:
        work = plan_decode(query_start, seq_lens, k_cache.shape[2]) if work is None else work
        attend = paged_decode_attention_hopper if fits_hopper_decode(q, k_cache) else paged_decode_attention_triton
        attend(q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, scale, out, work)
    else:
        paged_decode_attention_reference(
            q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, scale, out
        )


def paged_decode_attention_reference(
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
    """`paged_decode_attention` in plain PyTorch."""
    rows = torch.nonzero(query_start.diff() == 1)[:, 0]
    if not rows.numel():
        return
    tokens = query_start[rows]
    queries = q if rows.numel() == q.shape[0] else q[tokens]
    attended = _attend_rows(queries, k_cache, v_cache, block_tables[row_slots[rows]], seq_lens[rows], scale)
    out[tokens] = attended


def _attend_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one query a row: q [R, H, D], block_tables [R, B], seq_lens [R] -> [R, H, D]."""
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
    out = torch.empty_like(q)
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
    return out


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
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    work: DecodeWork,
) -> None:
    """`paged_decode_attention` by a Triton kernel."""
    num_heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    group = num_heads // kv_heads
    pieces = work.rows.shape[0]
    pdl = dependent_launch(q.device)
    launch(
        decode_kernel,
        (kv_heads, pieces),
        q,
        k_cache,
        v_cache,
        block_tables,
        row_slots,
        query_start,
        seq_lens,
        work.rows,
        work.chunks,
        work.firsts,
        work.chunk_len,
        work.arrivals,
        torch.empty((pieces, num_heads, head_dim), dtype=torch.float32, device=q.device),
        torch.empty((pieces, num_heads), dtype=torch.float32, device=q.device),
        out,
        scale * math.log2(math.e),
        block_tables.shape[1],
        group,
        kv_heads,
        block_size,
        head_dim,
        max(16, triton.next_power_of_2(group)),
        triton.next_power_of_2(group),
        triton.next_power_of_2(head_dim),
        BLOCK_N,
        COMBINED_AT_ONCE,
        pdl,
        not q.is_cuda,
        num_warps=4,
        num_stages=3,
        dependent=pdl,
    )
