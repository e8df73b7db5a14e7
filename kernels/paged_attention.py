"""Attention of a step that mixes decoding rows and rows of prompt tokens."""

from __future__ import annotations

import torch

from paceline.kernels.decode_work import DecodeWork
from paceline.kernels.paged_decode_attention import paged_decode_attention
from paceline.kernels.paged_prefill_attention import paged_prefill_attention


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    has_prefills: bool = True,
    has_decodes: bool = True,
    decode_work: DecodeWork | None = None,
    prefill_counter: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of every row's tokens over the paged cache: [T, H, D], of q's dtype.

    Rows with one token take the decode kernel, rows with more the prefill kernel; shapes and rules are those of
    `paged_decode_attention` (work: decode_work) and `paged_prefill_attention` (counter: prefill_counter). One is not
    launched where the caller knows that it has no rows. What comes out for padding tokens is undefined.
    """
    out = torch.empty_like(q)
    arguments = (q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, scale, out)
    if has_decodes:
        paged_decode_attention(*arguments, decode_work)
    if has_prefills:
        paged_prefill_attention(*arguments, prefill_counter)
    return out
