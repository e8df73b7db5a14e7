"""Decode attention of small groups: multiply-adds on keys and values straight from memory.

With few query heads a KV head there is too little to multiply for tensor cores to matter, and what they cost is time:
their operands take a way through shared memory, and a softmax over tokens that lie in several warps waits for all of
them. Here every thread holds some dimensions of some tokens. A score is a sum over the lanes of half a warp; each of
BLOCK_N places of a tile keeps a softmax of its own over the tiles, and only after the last tile are they put together.
The loop has no barrier and no shared memory; keys and values are fetched tiles ahead, the first before the kernel
waits for its queries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.decode_work import UNALIGNED
from paceline.kernels.paged_decode_combine import combine_if_last

MAX_GROUP = 4
LEAST = -1.0e30
"""Less than any score, and finite, so that a place that has seen nothing is one with weight zero."""


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def decode_vector_kernel(
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    row_slots_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
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
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
    COMBINED: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One chunk of one row, one KV head with its GROUP query heads, up to four; see decode_group_kernel."""
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
    newest = seq_len - 1
    table_ptr = block_tables_ptr + slot * block_table_width
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    place = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    real = dims < HEAD_DIM

    # The newest token is there only after the wait; it is left out of what is fetched before.
    offsets_0, wanted_0 = _tile(table_ptr, first + place, newest, last, BLOCK_SIZE, KV_HEADS * HEAD_DIM)
    mask_0 = wanted_0[:, None] & real[None, :]
    k_0 = tl.load(k_ptr + offsets_0[:, None] + dims[None, :], mask=mask_0, other=0.0)
    v_0 = tl.load(v_ptr + offsets_0[:, None] + dims[None, :], mask=mask_0, other=0.0)
    if DEPTH > 1:
        offsets_1, wanted_1 = _tile(table_ptr, first + BLOCK_N + place, newest, last, BLOCK_SIZE, KV_HEADS * HEAD_DIM)
        mask_1 = wanted_1[:, None] & real[None, :]
        k_1 = tl.load(k_ptr + offsets_1[:, None] + dims[None, :], mask=mask_1, other=0.0)
        v_1 = tl.load(v_ptr + offsets_1[:, None] + dims[None, :], mask=mask_1, other=0.0)
    # Block ids are fetched a tile before the keys and values that they lead to.
    ahead = first + DEPTH * BLOCK_N + place
    blocks = tl.load(table_ptr + tl.minimum(ahead, newest) // BLOCK_SIZE).to(tl.int64)
    new_block = tl.load(table_ptr + newest // BLOCK_SIZE).to(tl.int64)
    new_offsets = (new_block * BLOCK_SIZE + newest % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + dims
    head = token * KV_HEADS * GROUP + kv_head * GROUP
    q_ptr += head * HEAD_DIM + dims
    acc_0 = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    max_0 = tl.full((BLOCK_N,), LEAST, dtype=tl.float32)
    sum_0 = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if GROUP > 1:
        acc_1 = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
        max_1 = tl.full((BLOCK_N,), LEAST, dtype=tl.float32)
        sum_1 = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if GROUP > 2:
        acc_2 = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
        max_2 = tl.full((BLOCK_N,), LEAST, dtype=tl.float32)
        sum_2 = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if GROUP > 3:
        acc_3 = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
        max_3 = tl.full((BLOCK_N,), LEAST, dtype=tl.float32)
        sum_3 = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if PDL:
        gdc_wait()
    q_0 = tl.load(q_ptr, mask=real, other=0.0).to(tl.float32) * scale_log2
    if GROUP > 1:
        q_1 = tl.load(q_ptr + 1 * HEAD_DIM, mask=real, other=0.0).to(tl.float32) * scale_log2
    if GROUP > 2:
        q_2 = tl.load(q_ptr + 2 * HEAD_DIM, mask=real, other=0.0).to(tl.float32) * scale_log2
    if GROUP > 3:
        q_3 = tl.load(q_ptr + 3 * HEAD_DIM, mask=real, other=0.0).to(tl.float32) * scale_log2
    new_k = tl.load(k_ptr + new_offsets, mask=real, other=0.0)[None, :]
    new_v = tl.load(v_ptr + new_offsets, mask=real, other=0.0)[None, :]
    is_new = (first + place == newest)[:, None]
    k_0 = tl.where(is_new, new_k, k_0)
    v_0 = tl.where(is_new, new_v, v_0)
    if DEPTH > 1:
        is_new = (first + BLOCK_N + place == newest)[:, None]
        k_1 = tl.where(is_new, new_k, k_1)
        v_1 = tl.where(is_new, new_v, v_1)
    for start in range(first, last, BLOCK_N):
        ahead = start + DEPTH * BLOCK_N + place
        offsets = (blocks * BLOCK_SIZE + ahead % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
        mask = (ahead < last)[:, None] & real[None, :]
        k_ahead = tl.load(k_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        v_ahead = tl.load(v_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        blocks = tl.load(table_ptr + tl.minimum(ahead + BLOCK_N, newest) // BLOCK_SIZE).to(tl.int64)
        present = start + place < last
        k32 = k_0.to(tl.float32)
        v32 = v_0.to(tl.float32)
        acc_0, max_0, sum_0 = _fold(acc_0, max_0, sum_0, q_0, k32, v32, present)
        if GROUP > 1:
            acc_1, max_1, sum_1 = _fold(acc_1, max_1, sum_1, q_1, k32, v32, present)
        if GROUP > 2:
            acc_2, max_2, sum_2 = _fold(acc_2, max_2, sum_2, q_2, k32, v32, present)
        if GROUP > 3:
            acc_3, max_3, sum_3 = _fold(acc_3, max_3, sum_3, q_3, k32, v32, present)
        if DEPTH > 1:
            k_0, v_0 = k_1, v_1
            k_1, v_1 = k_ahead, v_ahead
        else:
            k_0, v_0 = k_ahead, v_ahead
    num_chunks = tl.cdiv(seq_len, chunk_len)
    share = piece.to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP
    row_ptr = out_ptr + head * HEAD_DIM + dims
    share_ptr = partial_ptr + share * HEAD_DIM + dims
    _store(acc_0, max_0, sum_0, num_chunks, row_ptr, share_ptr, log_sums_ptr + share, real)
    if GROUP > 1:
        _store(
            acc_1, max_1, sum_1, num_chunks, row_ptr + 1 * HEAD_DIM, share_ptr + 1 * HEAD_DIM,
            log_sums_ptr + share + 1, real,
        )  # fmt: skip
    if GROUP > 2:
        _store(
            acc_2, max_2, sum_2, num_chunks, row_ptr + 2 * HEAD_DIM, share_ptr + 2 * HEAD_DIM,
            log_sums_ptr + share + 2, real,
        )  # fmt: skip
    if GROUP > 3:
        _store(
            acc_3, max_3, sum_3, num_chunks, row_ptr + 3 * HEAD_DIM, share_ptr + 3 * HEAD_DIM,
            log_sums_ptr + share + 3, real,
        )  # fmt: skip
    if num_chunks > 1:
        combine_if_last(
            arrivals_ptr + row * KV_HEADS + kv_head, partial_ptr, log_sums_ptr, out_ptr + head * HEAD_DIM,
            (piece - chunk).to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP,
            num_chunks, GROUP, KV_HEADS, HEAD_DIM, BLOCK_G, BLOCK_D, COMBINED,
        )  # fmt: skip


@triton.jit
def _tile(
    table_ptr: tl.tensor,
    tokens: tl.tensor,
    newest: tl.tensor,
    last: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Offsets of tokens in the caches, and which of them are there before the newest and in the chunk."""
    blocks = tl.load(table_ptr + tl.minimum(tokens, newest) // BLOCK_SIZE).to(tl.int64)
    return (blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * TOKEN_STRIDE, (tokens < last) & (tokens != newest)


@triton.jit
def _fold(
    acc: tl.tensor,
    place_max: tl.tensor,
    place_sum: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    present: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold a tile into the online softmax of each of its places: q [D], k, v, acc [N, D], the others [N]; float32."""
    scores = tl.where(present, tl.sum(k * q[None, :], axis=1), float("-inf"))
    new_max = tl.maximum(place_max, scores)
    weights = tl.exp2(scores - new_max)
    rescale = tl.exp2(place_max - new_max)
    return acc * rescale[:, None] + weights[:, None] * v, new_max, place_sum * rescale + weights


@triton.jit
def _store(
    acc: tl.tensor,
    place_max: tl.tensor,
    place_sum: tl.tensor,
    num_chunks: tl.tensor,
    row_ptr: tl.tensor,
    share_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    real: tl.tensor,
) -> None:
    """Put the places together and store one head's result: the row's, or its chunk's share with its denominator."""
    top = tl.max(place_max, axis=0)
    weights = tl.exp2(place_max - top)
    total = tl.sum(place_sum * weights, axis=0)
    result = tl.sum(acc * weights[:, None], axis=0) / total
    if num_chunks == 1:
        tl.store(row_ptr, result.to(row_ptr.dtype.element_ty), mask=real)
    else:
        tl.store(share_ptr, result, mask=real)
        tl.store(log_sum_ptr, top + tl.log2(total))
