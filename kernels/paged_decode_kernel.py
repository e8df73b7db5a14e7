"""The kernel of decode attention: the query heads that share a KV head are one matrix for the tensor cores.

The program that finishes the last chunk of a row puts the row's results together.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.decode_work import UNALIGNED
from paceline.kernels.paged_attention_inner import attend

COMBINED_AT_ONCE = 16
"""Chunks whose results are loaded together."""
PREFETCHED = tl.constexpr(128)
"""Tokens that a program asks for while it still waits for the kernel before."""
LINE = tl.constexpr(64)
"""Elements of 16 bits in a line of the L2 cache."""


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def decode_kernel(
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    row_slots_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    chunk_len_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_log2: tl.tensor,
    block_table_width: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMBINED: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One chunk of one row, one KV head with its GROUP query heads.

    A row of one chunk goes straight to out. The chunks of others leave their results in partial [W, H, D] and the
    base-2 logarithms of their softmax denominators in log_sums [W, H].
    """
    # Pieces of nobody's come last, so that none of them is in the way of one that has to wait.
    piece = tl.program_id(1)
    kv_head = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    row = tl.load(rows_ptr + piece)
    if row < 0:
        if PDL and piece == 0:
            gdc_wait()  # the kernel as a whole must not end before the one it depends on
        return
    chunk = tl.load(chunks_ptr + piece)
    chunk_len = tl.load(chunk_len_ptr)
    seq_len = tl.load(seq_lens_ptr + row)
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    first = chunk * chunk_len
    last = tl.minimum(first + chunk_len, seq_len)

    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    head = kv_head * GROUP + members
    offsets = (token * KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    table_ptr = block_tables_ptr + slot * block_table_width
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if PDL:
        # Only the newest token is the work of the kernel before; the others' keys and values are from earlier steps.
        old = tl.minimum(last, seq_len - 1)
        _prefetch(k_ptr, v_ptr, table_ptr, first, old, BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM)
        gdc_wait()
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, first, last, scale_log2,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, UPCAST,
    )  # fmt: skip
    result = acc / row_sum[:, None]
    num_chunks = tl.cdiv(seq_len, chunk_len)
    if num_chunks == 1:
        tl.store(out_ptr + offsets, result, mask=mask)
    else:
        first_of_row = tl.load(firsts_ptr + piece).to(tl.int64)
        share = (first_of_row + chunk) * KV_HEADS * GROUP + head
        tl.store(partial_ptr + share[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
        tl.store(log_sums_ptr + share, row_max + tl.log2(row_sum), mask=members < GROUP)
        first_share = first_of_row * KV_HEADS * GROUP + kv_head * GROUP
        _combine_if_last(
            arrivals_ptr + row * KV_HEADS + kv_head, partial_ptr, log_sums_ptr,
            out_ptr + (token * KV_HEADS + kv_head) * GROUP * HEAD_DIM, first_share,
            num_chunks, GROUP, KV_HEADS, HEAD_DIM, BLOCK_G, BLOCK_D, COMBINED,
        )  # fmt: skip


@triton.jit
def _prefetch(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Ask for the keys and values of up to PREFETCHED tokens from the first on to be brought to the L2 cache."""
    tokens = first + tl.arange(0, PREFETCHED)
    # Tokens past the end stand for the first.
    tokens = tl.where(tokens < last, tokens, first)
    slots = tl.load(table_ptr + tokens // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
    for line in tl.static_range(0, HEAD_DIM, LINE):
        for ptr in tl.static_range(2):
            address = (k_ptr if ptr == 0 else v_ptr) + slots * TOKEN_STRIDE + line
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [address.to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _combine_if_last(
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
