"""Attention of rows with one query token over their keys and values in the paged cache.

The kernel takes a group of query heads that share a KV head as one matrix. Long rows are cut into chunks, as in
Flash-Decoding (https://pytorch.org/blog/flash-decoding/), which decode_work deals out; the program that finishes a
row's last chunk puts the row's results together, so that no second kernel is needed.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.decode_work import BLOCK_N, DecodeWork, plan_decode
from paceline.kernels.launch import dependent_launch
from paceline.kernels.paged_attention_inner import attend

_GATHER_BYTES = 2 << 20
"""The reference gathers the keys of as many rows at a time as make this much: about a core's share of the cache."""
_COMBINED_AT_ONCE = 8


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
        paged_decode_attention_triton(
            q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, scale, out, work
        )
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
    partial = torch.empty((pieces, num_heads, head_dim), dtype=torch.float32, device=q.device)
    log_sums = torch.empty((pieces, num_heads), dtype=torch.float32, device=q.device)
    pdl = dependent_launch(q.device)
    _decode_kernel[(kv_heads, pieces)](
        q,
        k_cache,
        v_cache,
        block_tables,
        row_slots,
        query_start,
        seq_lens,
        work.rows,
        work.chunks,
        work.chunk_len,
        work.arrivals,
        partial,
        log_sums,
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
        _COMBINED_AT_ONCE,
        pdl,
        not q.is_cuda,
        num_warps=4,
        num_stages=3,
        **({"launch_pdl": True} if pdl else {}),
    )


_INDEX_POINTERS = ["block_tables_ptr", "row_slots_ptr", "query_start_ptr", "seq_lens_ptr"]
_WORK_POINTERS = ["rows_ptr", "chunks_ptr", "chunk_len_ptr", "arrivals_ptr"]


@triton.jit(do_not_specialize_on_alignment=_INDEX_POINTERS + _WORK_POINTERS)
def _decode_kernel(
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
    last_whole = first + (last - first) // BLOCK_N * BLOCK_N

    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    head = kv_head * GROUP + members
    offsets = (token * KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    table_ptr = block_tables_ptr + slot * block_table_width
    limit = tl.zeros((BLOCK_M,), dtype=tl.int32) + seq_len
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if PDL:
        gdc_wait()
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    # fmt: off
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, first, last_whole, limit, scale_log2,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, False, UPCAST,
    )
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, last_whole, last, limit, scale_log2,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, True, UPCAST,
    )
    # fmt: on
    result = acc / row_sum[:, None]
    num_chunks = tl.cdiv(seq_len, chunk_len)
    if num_chunks == 1:
        tl.store(out_ptr + offsets, result, mask=mask)
    else:
        share = piece.to(tl.int64) * KV_HEADS * GROUP + head
        tl.store(partial_ptr + share[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
        tl.store(log_sums_ptr + share, row_max + tl.log2(row_sum), mask=members < GROUP)
        tl.debug_barrier()  # All threads' results are written before one of them says so.
        arrival_ptr = arrivals_ptr + row * KV_HEADS + kv_head
        arrived = tl.atomic_add(arrival_ptr, 1, sem="acq_rel")
        if arrived == num_chunks - 1:
            tl.store(arrival_ptr, 0)  # for the next layer
            first_share = (piece - chunk).to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP
            _combine(
                partial_ptr, log_sums_ptr, out_ptr + (token * KV_HEADS + kv_head) * GROUP * HEAD_DIM, first_share,
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
