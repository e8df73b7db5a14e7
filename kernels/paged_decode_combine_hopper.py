"""Putting the results of a row's chunks together, by the program of the Hopper decode kernel that is through last."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paceline.kernels.gluon_names import wait_for_each_other

CHUNKS_AT_ONCE = gl.constexpr(8)
"""Chunks whose results are loaded together."""
MEMBERS_AT_ONCE = gl.constexpr(4)
"""Heads of a group whose results are: a warp for each."""


@gluon.jit
def combine_if_last(
    arrival_ptr: gl.tensor,
    partial_ptr: gl.tensor,
    log_sums_ptr: gl.tensor,
    out_ptr: gl.tensor,
    first_share: gl.tensor,
    num_chunks: gl.tensor,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
) -> None:
    """Count a program's chunk as done; after the last, average a group's results over the chunks of its row.

    partial [W, H, D] holds them and log_sums [W, H] the base-2 logarithms of their softmax denominators, by which they
    are weighted; first_share is the index of the first chunk and head. out_ptr points at the group's first head.
    """
    wait_for_each_other()  # All threads' results are written before one of them says so.
    arrived = gl.atomic_add(arrival_ptr, 1, sem="acq_rel")
    if arrived == num_chunks - 1:
        gl.store(arrival_ptr, 0)  # for the next layer
        for first_member in gl.static_range(0, GROUP, MEMBERS_AT_ONCE):
            # fmt: off
            _combine(
                partial_ptr, log_sums_ptr, out_ptr, first_share, num_chunks, first_member, GROUP, KV_HEADS, HEAD_DIM
            )
            # fmt: on


@gluon.jit
def _combine(
    partial_ptr: gl.tensor,
    log_sums_ptr: gl.tensor,
    out_ptr: gl.tensor,
    first_share: gl.tensor,
    num_chunks: gl.tensor,
    FIRST_MEMBER: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
) -> None:
    """Average the results of some heads of a group over the chunks of their row."""
    # A warp has a head, and each thread some of its dimensions, of all chunks: so no thread needs what another has.
    layout: gl.constexpr = gl.BlockedLayout([1, 1, HEAD_DIM // 32], [1, 1, 32], [1, MEMBERS_AT_ONCE, 1], [2, 1, 0])
    of_shares: gl.constexpr = gl.SliceLayout(2, layout)
    of_out: gl.constexpr = gl.SliceLayout(0, layout)
    chunk_places = gl.arange(0, CHUNKS_AT_ONCE, layout=gl.SliceLayout(1, of_shares))
    members = FIRST_MEMBER + gl.arange(0, MEMBERS_AT_ONCE, layout=gl.SliceLayout(0, of_shares))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    acc = gl.zeros([MEMBERS_AT_ONCE, HEAD_DIM], gl.float32, layout=of_out)
    total = gl.zeros([MEMBERS_AT_ONCE, 1], gl.float32, layout=of_out)
    largest = gl.full([MEMBERS_AT_ONCE, 1], float("-inf"), gl.float32, layout=of_out)
    for start in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = start + chunk_places
        real = (chunks < num_chunks)[:, None] & (members < GROUP)[None, :]
        share = first_share + chunks[:, None] * (KV_HEADS * GROUP) + members[None, :]
        # Other programs wrote these in this very kernel: they are in the L2 cache, and never in an older L1 line.
        log_sums = gl.load(log_sums_ptr + share, mask=real, other=float("-inf"), cache_modifier=".cg")
        partial = gl.load(
            partial_ptr + share[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=real[:, :, None] & (dims >= 0)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        log_sums = log_sums[:, :, None]
        new_largest = gl.maximum(largest, gl.max(log_sums, axis=0))
        safe = gl.where(new_largest == float("-inf"), 0.0, new_largest)  # of members past the group
        weights = gl.exp2(log_sums - safe[None, :, :])
        rescale = gl.exp2(largest - safe)
        total = total * rescale + gl.sum(weights, axis=0)
        acc = acc * rescale + gl.sum(partial * weights, axis=0)
        largest = new_largest
    out_members = FIRST_MEMBER + gl.arange(0, MEMBERS_AT_ONCE, layout=gl.SliceLayout(1, of_out))
    out_dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, of_out))
    offsets = out_members[:, None] * HEAD_DIM + out_dims[None, :]
    stored = (out_members < GROUP)[:, None] & (out_dims >= 0)[None, :]
    gl.store(out_ptr + offsets, (acc / total).to(out_ptr.dtype.element_ty), mask=stored)
