"""Attention of a step that mixes decoding rows and rows of prompt tokens."""

from __future__ import annotations

import torch

from paceline.kernels.paged_decode_attention import paged_decode_attention
from paceline.kernels.paged_prefill_attention import paged_prefill_attention


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    num_decode_rows: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
) -> torch.Tensor:
    """Return causal attention of every row's tokens over the paged cache: [T, H, D], of q's dtype.

    The first num_decode_rows rows have one token each and take the decode kernel, the other rows the prefill kernel;
    shapes and rules are those of `paged_decode_attention` and `paged_prefill_attention`.
    """
    out = torch.empty_like(q)
    split = num_decode_rows
    if split > 0:
        paged_decode_attention(
            q[:split],
            k_cache,
            v_cache,
            block_tables[:split],
            seq_lens[:split],
            scale,
            max_seq_len,
            out[:split],
        )
    if split < seq_lens.shape[0]:
        paged_prefill_attention(
            q,
            k_cache,
            v_cache,
            block_tables[split:],
            seq_lens[split:],
            query_start[split:],
            max_query_len,
            scale,
            out,
        )
    return out
