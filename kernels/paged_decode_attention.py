"""Attention of rows with one query token over their keys and values in the paged cache.

The kernel starts from the fused projection: it norms and turns the query and the new key itself, and stores the new key
and value, since a launch of its own for that would take longer than the work. All it needs but the new token has been
in the cache before the projection ran, so a program fetches its first keys and values while that still does.

A group of query heads that share a KV head is taken as one matrix. Long rows are cut into chunks, as in Flash-Decoding
(https://pytorch.org/blog/flash-decoding/), which decode_work deals out; the program that finishes a row's last chunk
puts the row's results together, so that no second kernel is needed.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.decode_work import BLOCK_N, DecodeWork
from paceline.kernels.launch import dependent_launch
from paceline.kernels.paged_attention_inner import attend, fold

_GATHER_BYTES = 2 << 20
"""The reference gathers the keys of as many rows at a time as make this much: about a core's share of the cache."""
_COMBINED_AT_ONCE = 8
_NUM_WARPS = 4
_NUM_STAGES = 3


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
    """The attention of `paged_decode_attention_triton` in plain PyTorch, of queries that are ready.

    Writes softmax(scale * q @ keys) @ values to out for the rows that have one token. Row r's token is query_start[r]
    of the T; it is the newest of its seq_lens[r] tokens, whose keys and values are in the blocks of
    block_tables[row_slots[r]]. Cache memory past a row's length and table entries past its last block have no
    influence, whatever they hold. Rows of no and of several tokens are left alone; the former may have any slot.

    q, out: [T, H, D], contiguous. k_cache, v_cache: [NB, BS, K, D], contiguous, of q's dtype, BS a power of two and H a
    multiple of K; query head h reads KV head h // (H / K). block_tables: [S, B] int32, contiguous. row_slots: [R]
    int32. query_start: [R + 1] int32. seq_lens: [R] int32.
    """
    rows = torch.nonzero(query_start.diff() == 1)[:, 0]
    if not rows.numel():
        return
    tokens = query_start[rows]
    queries = q if rows.numel() == q.shape[0] else q[tokens]
    out[tokens] = _attend_rows(queries, k_cache, v_cache, block_tables[row_slots[rows]], seq_lens[rows], scale)


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
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
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
    """`rotary_and_store` and then attention, for the rows that have one token, by a Triton kernel.

    Arguments are those of the two references, but that a row's position and place in the cache follow from its length
    and its table. work: `plan_decode` of the same rows.
    """
    head_dim = out.shape[-1]
    block_size, kv_heads = k_cache.shape[1:3]
    num_heads = out.shape[1]
    group = num_heads // kv_heads
    pieces = work.rows.shape[0]
    partial = torch.empty((pieces, num_heads, head_dim), dtype=torch.float32, device=qkv.device)
    log_sums = torch.empty((pieces, num_heads), dtype=torch.float32, device=qkv.device)
    norm = q_norm is not None
    pdl = dependent_launch(qkv.device)
    _decode_kernel[(kv_heads, pieces)](
        qkv,
        q_norm if norm else qkv,
        k_norm if norm else qkv,
        cos_sin,
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
        eps,
        scale * math.log2(math.e),
        block_tables.shape[1],
        group,
        kv_heads,
        block_size,
        head_dim,
        cos_sin.shape[1] // 2,
        max(16, triton.next_power_of_2(group)),
        triton.next_power_of_2(group),
        triton.next_power_of_2(head_dim),
        BLOCK_N,
        _COMBINED_AT_ONCE,
        norm,
        pdl,
        not qkv.is_cuda,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
        **({"launch_pdl": True} if pdl else {}),
    )


_INDEX_POINTERS = ["block_tables_ptr", "row_slots_ptr", "query_start_ptr", "seq_lens_ptr"]
_WORK_POINTERS = ["rows_ptr", "chunks_ptr", "chunk_len_ptr", "arrivals_ptr"]


@triton.jit(do_not_specialize_on_alignment=_INDEX_POINTERS + _WORK_POINTERS)
def _decode_kernel(
    qkv_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
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
    eps: tl.tensor,
    scale_log2: tl.tensor,
    block_table_width: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMBINED: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One chunk of one row, one KV head with its GROUP query heads.

    A row of one chunk goes straight to out. The chunks of others leave their results in partial [W, H, D] and the
    base-2 logarithms of their softmax denominators in log_sums [W, H].
    """
    # Pieces of nobody's come last, so that none of them is in the way of one that has to wait for the projection.
    piece = tl.program_id(1)
    kv_head = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    row = tl.load(rows_ptr + piece)
    if row < 0:
        if PDL:
            if piece == 0:
                gdc_wait()  # the kernel as a whole must not end before the one it depends on
        return
    chunk = tl.load(chunks_ptr + piece)
    chunk_len = tl.load(chunk_len_ptr)
    cached = tl.load(seq_lens_ptr + row) - 1  # also the position of the new token
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    num_chunks = tl.maximum(tl.cdiv(cached, chunk_len), 1)
    has_new = chunk == num_chunks - 1
    first = chunk * chunk_len
    last = tl.minimum(first + chunk_len, cached)
    table_ptr = block_tables_ptr + slot * block_table_width

    dims = tl.arange(0, BLOCK_D)
    real_dims = dims < HEAD_DIM
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    tokens = first + tl.arange(0, BLOCK_N)
    present = tokens < last
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
    cache_slots = blocks * BLOCK_SIZE + tokens % BLOCK_SIZE
    cache_offsets = cache_slots[:, None] * (KV_HEADS * HEAD_DIM) + dims[None, :]
    cache_mask = present[:, None] & real_dims[None, :]
    k = tl.load(k_ptr + cache_offsets, mask=cache_mask, other=0.0)
    v = tl.load(v_ptr + cache_offsets, mask=cache_mask, other=0.0)

    # A dimension turns with its partner, and those past the first 2 * HALF turn with none.
    turns = dims < 2 * HALF
    partner = tl.where(dims < HALF, dims + HALF, tl.where(turns, dims - HALF, dims))
    angle = cos_sin_ptr + cached.to(tl.int64) * 2 * HALF + dims % HALF
    cos = tl.where(turns, tl.load(angle), 1.0)
    sin = tl.load(angle + HALF)
    sin = tl.where(dims < HALF, -sin, tl.where(turns, sin, 0.0))
    if NORM:
        q_weight = tl.load(q_norm_ptr + dims, mask=real_dims, other=0.0).to(tl.float32)
        q_partner_weight = tl.load(q_norm_ptr + partner, mask=real_dims, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + dims, mask=real_dims, other=0.0).to(tl.float32)
        k_partner_weight = tl.load(k_norm_ptr + partner, mask=real_dims, other=0.0).to(tl.float32)
    new_block = tl.load(table_ptr + cached // BLOCK_SIZE).to(tl.int64)
    new_offset = (new_block * BLOCK_SIZE + cached % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + dims

    members = tl.arange(0, BLOCK_M)
    mask = (members < GROUP)[:, None] & real_dims[None, :]
    head = kv_head * GROUP + members
    token_ptr = qkv_ptr + token * ((GROUP + 2) * KV_HEADS * HEAD_DIM)
    q_ptr = token_ptr + head[:, None] * HEAD_DIM
    new_k_ptr = token_ptr + (GROUP * KV_HEADS + kv_head) * HEAD_DIM
    if PDL:
        gdc_wait()
    q = tl.load(q_ptr + dims[None, :], mask=mask, other=0.0)
    q_partner = tl.load(q_ptr + partner[None, :], mask=mask, other=0.0)
    new_k = tl.load(new_k_ptr + dims, mask=real_dims, other=0.0)
    new_k_partner = tl.load(new_k_ptr + partner, mask=real_dims, other=0.0)
    new_v = tl.load(new_k_ptr + KV_HEADS * HEAD_DIM + dims, mask=real_dims, other=0.0)
    q32, q_partner32 = q.to(tl.float32), q_partner.to(tl.float32)
    k32, k_partner32 = new_k.to(tl.float32), new_k_partner.to(tl.float32)
    if NORM:
        q_scale = tl.rsqrt(tl.sum(q32 * q32, axis=1) / HEAD_DIM + eps)[:, None]
        k_scale = tl.rsqrt(tl.sum(k32 * k32, axis=0) / HEAD_DIM + eps)
        q32 = _weighted(q32 * q_scale, q_weight[None, :], q.dtype)
        q_partner32 = _weighted(q_partner32 * q_scale, q_partner_weight[None, :], q.dtype)
        k32 = _weighted(k32 * k_scale, k_weight, q.dtype)
        k_partner32 = _weighted(k_partner32 * k_scale, k_partner_weight, q.dtype)
    q = (q32 * cos[None, :] + q_partner32 * sin[None, :]).to(q.dtype)
    new_k = (k32 * cos + k_partner32 * sin).to(q.dtype)
    tl.store(k_ptr + new_offset, new_k, mask=real_dims & has_new)
    tl.store(v_ptr + new_offset, new_v, mask=real_dims & has_new)
    if UPCAST:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)

    # The new token first: its score is finite, and after it any tile may be empty.
    new_score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], axis=1) * scale_log2
    row_max = tl.where(has_new, new_score, float("-inf"))
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32) + tl.where(has_new, 1.0, 0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32) + tl.where(has_new, new_v.to(tl.float32), 0.0)[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale_log2
    scores = tl.where(present[None, :], scores, float("-inf"))
    acc, row_max, row_sum = fold(acc, row_max, row_sum, scores, v)
    limit = tl.zeros((BLOCK_M,), dtype=tl.int32) + last
    second = first + BLOCK_N
    last_whole = second + tl.maximum(last - second, 0) // BLOCK_N * BLOCK_N
    # fmt: off
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, second, last_whole, limit, scale_log2,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, False, UPCAST,
    )
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, last_whole, last, limit, scale_log2,
        BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, True, UPCAST,
    )
    # fmt: on
    result = acc / row_sum[:, None]
    if num_chunks == 1:
        offsets = (token * KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
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
def _weighted(normed: tl.tensor, weight: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Normed values times their weight in float32, rounded before and after as where each is an operation."""
    return (normed.to(DTYPE).to(tl.float32) * weight).to(DTYPE).to(tl.float32)


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
