"""What a forward pass needs to know of its step, beside the token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.kernels.decode_work import DecodeWork

KVCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [num_blocks, block_size, kv_heads, head_dim]."""


@dataclass(frozen=True)
class StepContext:
    """A step of T tokens in R rows (one row a request); all tensors are on the model's device.

    A row's tokens are consecutive among the T. Rows and tokens may be padding: then query_start does not grow, and a
    token writes nowhere.
    """

    positions: torch.Tensor
    """[T] int32: each token's position in its request."""
    slot_mapping: torch.Tensor
    """[T] int64: block_id * block_size + offset where a token's key and value go; -1 writes nowhere."""
    query_start: torch.Tensor
    """[R + 1] int32: row r owns tokens query_start[r] to query_start[r + 1]."""
    seq_lens: torch.Tensor
    """[R] int32: tokens with keys and values once this step's are stored (so a row attends to seq_lens[r] tokens)."""
    block_tables: torch.Tensor
    """[S, B] int32: block ids of each slot in order; entries past its length are undefined."""
    row_slots: torch.Tensor
    """[R] int32: each row's line of block_tables."""
    logits_tokens: torch.Tensor | None
    """[N] int64: which of the T tokens need logits; None: all, in order."""
    kv_caches: Sequence[KVCache]
    """One entry a layer."""
    has_prefills: bool = True
    """Whether a row may have more than one token. To know that none has spares launches."""
    has_decodes: bool = True
    """Whether a row may have exactly one token; as above."""
    decode_work: DecodeWork | None = None
    """On a GPU, `plan_decode` of this step, if it may have such rows."""
    prefill_counter: torch.Tensor | None = None
    """[1] int32: the counter of `paged_prefill_attention`, which steps that run one after the other share."""
