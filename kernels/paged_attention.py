"""From the fused projection of queries, keys and values to attention over the paged cache, for any mix of rows."""

from __future__ import annotations

import torch

from paceline.kernels.decode_work import DecodeWork, plan_decode
from paceline.kernels.paged_decode_attention import paged_decode_attention_reference, paged_decode_attention_triton
from paceline.kernels.paged_prefill_attention import paged_prefill_attention
from paceline.kernels.rotary_and_store import rotary_and_store


def paged_attention(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    has_decodes: bool = True,
    has_prefills: bool = True,
    decode_work: DecodeWork | None = None,
) -> torch.Tensor:
    """Return causal attention of every row's tokens over the paged cache, [T, H, D]; store their keys and values.

    Queries and keys are normed and turned as `rotary_and_store` says, whose the first arguments are; the others are
    those of `paged_decode_attention_reference` and `paged_prefill_attention`. Rows with one token take the decode
    kernel, rows with more the prefill kernel; a kernel that the caller knows to have no rows is not launched. What
    comes out for padding tokens is undefined. decode_work: `plan_decode` of the same rows, which a step on a GPU makes
    once for all its layers.
    """
    kv_heads, head_dim = k_cache.shape[2:]
    cached = (block_tables, row_slots, query_start, seq_lens, scale)
    if qkv.is_cuda and not has_prefills:
        out = qkv.new_empty((qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, head_dim))
    else:
        query = rotary_and_store(qkv, q_norm, k_norm, eps, positions, cos_sin, k_cache, v_cache, slot_mapping)
        out = torch.empty_like(query)
    if has_decodes and qkv.is_cuda:
        # The kernel does for its rows what rotary_and_store, where it ran, did for all: the same values once more.
        work = plan_decode(query_start, seq_lens, kv_heads) if decode_work is None else decode_work
        paged_decode_attention_triton(qkv, q_norm, k_norm, eps, cos_sin, k_cache, v_cache, *cached, out, work)
    elif has_decodes:
        paged_decode_attention_reference(query, k_cache, v_cache, *cached, out)
    if has_prefills:
        paged_prefill_attention(query, k_cache, v_cache, *cached, out)
    return out
