"""Attention the plain ways, to compare kernels with: on gathered keys and values, and by a plain Triton kernel.

All take one query token a row: q [R, H, D], caches [NB, BS, K, D], block_tables [R, B] int32 whose rows all hold
`length` tokens. Query head h reads KV head h // (H / K).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.nn import functional

_BLOCK_N = 64


def gather(cache: torch.Tensor, block_tables: torch.Tensor, length: int) -> torch.Tensor:
    """Copy the rows' entries of a cache out of its blocks: [R, K, length, D], contiguous."""
    rows, blocks = block_tables.shape
    block_size, kv_heads, head_dim = cache.shape[1:]
    entries = cache.index_select(0, block_tables.flatten()).view(rows, blocks * block_size, kv_heads, head_dim)
    return entries[:, :length].transpose(1, 2).contiguous()


def softmax_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Two matrix products and a softmax, over keys and values [R, K, L, D]: [R, H, D] of q's dtype."""
    rows, heads, head_dim = q.shape
    grouped = q.view(rows, keys.shape[1], -1, head_dim)
    weights = (grouped @ keys.transpose(2, 3) * scale).softmax(-1, dtype=torch.float32)
    return (weights.to(values.dtype) @ values).view(rows, heads, head_dim)


def sdpa(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """PyTorch's fused attention over the same, by the backend that it chooses."""
    return functional.scaled_dot_product_attention(q[:, :, None], keys, values, scale=scale, enable_gqa=True)[:, :, 0]


def float32_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor, length: int, scale: float
) -> torch.Tensor:
    """The reference, in float32 and a row at a time: [R, H, D] float32."""
    rows = []
    for query, table in zip(q, block_tables, strict=True):
        keys, values = (gather(cache, table[None], length).float() for cache in (k_cache, v_cache))
        rows.append(softmax_attention(query[None].float(), keys, values, scale))
    return torch.cat(rows)


def naive_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """A Triton kernel with one program a row and query head, which walks all of the row's tokens; returns out."""
    rows, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    _naive_decode_kernel[(rows, heads)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        scale * math.log2(math.e),
        block_tables.shape[1],
        heads // kv_heads,
        kv_heads,
        block_size,
        head_dim,
        triton.next_power_of_2(head_dim),
        _BLOCK_N,
    )
    return out


@triton.jit
def _naive_decode_kernel(
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_log2: tl.tensor,
    block_table_width: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + row)
    dims = tl.arange(0, BLOCK_D)
    q_offset = (row * tl.num_programs(1) + head) * HEAD_DIM
    q = tl.load(q_ptr + q_offset + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32) * scale_log2
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    peak = float("-inf")
    total = 0.0
    for start in range(0, seq_len, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        present = tokens < seq_len
        blocks = tl.load(block_tables_ptr + row * block_table_width + tokens // BLOCK_SIZE, mask=present, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        offsets = (slots[:, None] * KV_HEADS + head // GROUP) * HEAD_DIM + dims[None, :]
        mask = present[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_cache_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(present, tl.sum(q[None, :] * k, axis=1), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=0))
        weights = tl.exp2(scores - new_peak)
        rescale = tl.exp2(peak - new_peak)
        v = tl.load(v_cache_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        acc = acc * rescale + tl.sum(weights[:, None] * v, axis=0)
        total = total * rescale + tl.sum(weights, axis=0)
        peak = new_peak
    tl.store(out_ptr + q_offset + dims, acc / total, mask=dims < HEAD_DIM)
