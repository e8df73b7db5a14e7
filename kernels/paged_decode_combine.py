"""Putting a row's results together once all its chunks are done, by whichever program is the last."""

from __future__ import annotations

import triton
import triton.language as tl

COMBINED_AT_ONCE = 8


@triton.jit
def combine_if_last(
    arrival_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_share: tl.tensor,
    num_chunks: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMBINED: tl.constexpr,
) -> None:
    """Count a program's chunk as done; after the last, average a group's results over the chunks of its row.

    partial [W, H, D] holds them and log_sums [W, H] the base-2 logarithms of their softmax denominators, by which they
    are weighted; first_share is the index of the first chunk and head. out_ptr points at the group's first head.
    """
    tl.debug_barrier()  # All threads' results are written before one of them says so.
    arrived = tl.atomic_add(arrival_ptr, 1, sem="acq_rel")
    if arrived == num_chunks - 1:
        tl.store(arrival_ptr, 0)  # for the next layer
        _combine(
            partial_ptr, log_sums_ptr, out_ptr, first_share,
            num_chunks, GROUP, KV_HEADS, HEAD_DIM, BLOCK_G, BLOCK_D, COMBINED,
        )  # fmt: skip


@triton.jit
def _combine(
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_share: tl.tensor,
    num_chunks: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMBINED: tl.constexpr,
) -> None:
    """Average a group's results over the chunks of its row, weighted by their softmax denominators."""
    members = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    largest = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_G,), dtype=tl.float32)
    for start in range(0, num_chunks, COMBINED):
        chunk = start + tl.arange(0, COMBINED)
        share = first_share + chunk[:, None] * KV_HEADS * GROUP + members[None, :]
        mask = (chunk < num_chunks)[:, None] & (members < GROUP)[None, :]
        # Other programs wrote these in this very kernel: they are in the L2 cache, and never in an older L1 line.
        log_sums = tl.load(log_sums_ptr + share, mask=mask, other=float("-inf"), cache_modifier=".cg")
        partial = tl.load(
            partial_ptr + share[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=mask[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_largest = tl.maximum(largest, tl.max(log_sums, axis=0))
        safe = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # of members past the group
        weights = tl.exp2(log_sums - safe[None, :])
        rescale = tl.exp2(largest - safe)
        total = total * rescale + tl.sum(weights, axis=0)
        acc = acc * rescale[:, None] + tl.sum(partial * weights[:, :, None], axis=0)
        largest = new_largest
    offsets = members[:, None] * HEAD_DIM + dims[None, :]
    mask = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + offsets, acc / total[:, None], mask=mask)
