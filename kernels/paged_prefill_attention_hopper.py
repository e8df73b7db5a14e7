"""The kernel of `paged_prefill_attention` for Hopper GPUs, in Gluon (Triton's language of explicit layouts).

After FlashAttention-3 (arXiv 2407.08608): every processor runs one program, which takes 128 pairs of query and head
after the other. One of its warps draws the work and fetches the queries, a piece ahead of their use; two have the
tensor memory accelerator copy tiles of keys and of values to shared memory, cache block by cache block; two groups of
four warps take 64 pairs each. While a group's product of weights and values runs on the tensor cores, it computes the
weights of the next tile.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paceline.kernels.gluon_names import HALF
from paceline.kernels.launch import is_hopper, launch, num_processors
from paceline.kernels.paged_prefill_loader_hopper import (
    FIRST_PAIR,
    KV_HEAD,
    NUM_TILES,
    PIECES,
    POSITION,
    QUERY_BEGIN,
    QUERY_LEN,
    at,
    find_work,
    hear,
    load_tiles,
)
from paceline.kernels.tensor_descriptors import describe

_GROUP_M = gl.constexpr(64)
_GROUP_REGISTERS = gl.constexpr(224)
_LOADER_REGISTERS = gl.constexpr(56)


def fits_hopper_kernel(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Return whether this kernel takes such queries, [T, H, D], and caches, [NB, BS, K, D], on their device."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in (64, 128)
        and k_cache.shape[1] in (16, 32, 64)
        and is_hopper(q.device)
    )


def paged_prefill_attention_hopper(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    counter: torch.Tensor | None = None,
    block_n: int = 128,
    stages: int = 2,
) -> None:
    """`paged_prefill_attention` by a Gluon kernel, for what `fits_hopper_kernel`.

    It takes block_n keys at a time, with room for `stages` times as many.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_size, kv_heads = k_cache.shape[:3]
    group, num_rows = num_heads // kv_heads, row_slots.shape[0]
    most_rows = min(num_rows, num_tokens // 2)  # of two or more tokens
    if most_rows == 0:
        return
    num_slots, width = num_blocks * block_size, kv_heads * head_dim
    k_slots, v_slots = (
        describe(cache, (num_slots, width), (width, 1), (block_size, HALF.value)) for cache in (k_cache, v_cache)
    )
    # Every row can leave one tile partly filled.
    most_tiles = -(-num_tokens * group // (2 * _GROUP_M.value)) + most_rows
    launch(
        _hopper_prefill_kernel,
        (min(most_tiles * kv_heads, num_processors(q.device)),),
        q,
        k_slots,
        v_slots,
        v_cache,
        block_tables,
        row_slots,
        query_start,
        seq_lens,
        out,
        torch.zeros(1, dtype=torch.int32, device=q.device) if counter is None else counter,
        scale * math.log2(math.e),
        num_rows,
        num_slots,
        block_tables.shape[1],
        group,
        kv_heads,
        head_dim,
        block_n,
        stages,
        num_warps=4,
    )


@gluon.jit
def _softmax(
    scores: gl.tensor,
    row_max: gl.tensor,
    row_sum: gl.tensor,
    scale_log2: gl.tensor,
    limit: gl.tensor,
    start: gl.tensor,
    MASKED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Return the weights of a tile of scores, the factor for what was summed before, the new maxima and sums."""
    if MASKED:
        tokens = start + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(tokens[None, :] <= limit[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, axis=1))
    shift = new_max * scale_log2
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    rescale = gl.exp2(row_max * scale_log2 - shift)
    row_sum = row_sum * rescale + gl.sum(weights, axis=1)
    return weights, rescale, new_max, row_sum


@gluon.jit
def _step(
    i: gl.tensor,
    done: gl.tensor,
    state: gl.tuple,
    q: gl.shared_memory_descriptor,
    sums: gl.shared_memory_descriptor,
    keys: gl.tuple,
    values: gl.tuple,
    scale_log2: gl.tensor,
    limit: gl.tensor,
    MASKED: gl.constexpr,
) -> gl.tuple:
    """Add the values of tile i - 1 with their weights to acc and compute the weights of tile i meanwhile.

    These are the row's tiles; the program has been through `done` tiles before them.
    """
    acc, weights, row_max, row_sum = state
    k_tiles, k_full, k_empty = keys
    v_tiles, v_full, v_empty = values
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    stage = (done + i) % STAGES
    before = (done + i - 1) % STAGES
    zeros = gl.zeros([_GROUP_M, BLOCK_N], gl.float32, layout=layout)
    mbarrier.wait(k_full.index(stage), ((done + i) // STAGES) & 1)
    scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((done + i - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    new, rescale, row_max, row_sum = _softmax(scores, row_max, row_sum, scale_log2, limit, i * BLOCK_N, MASKED)
    new = gl.convert_layout(new.to(weights.dtype), weights.type.layout)
    # ptxas would move the wait for acc up before the exponentials, so that nothing ran while acc is computed. It
    # cannot where the group's barrier, which comes with an arrival, waits for a store of what they sum up to.
    sums.store(row_sum)
    mbarrier.arrive(k_empty.index(stage))
    acc, weights = warpgroup_mma_wait(0, deps=[acc, new])
    mbarrier.arrive(v_empty.index(before))
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, weights, row_max, row_sum


@gluon.jit
def _attend_piece(
    q: gl.shared_memory_descriptor,
    sums: gl.shared_memory_descriptor,
    keys: gl.tuple,
    values: gl.tuple,
    out_ptr: gl.tensor,
    scale_log2: gl.tensor,
    piece: gl.tuple,
    done: gl.tensor,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
) -> None:
    """Write attention of 64 pairs from first_pair on, over num_tiles tiles of keys or fewer, `done` before.

    q: [64, head size], the pairs' queries, in whose place their results are afterwards.
    """
    query_begin, query_len, position, first_pair, kv_head, num_tiles = piece
    k_tiles, k_full, k_empty = keys
    v_tiles, v_full, v_empty = values
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])

    # Pairs past the end stand in for the last query, and are not stored.
    pairs = first_pair + gl.arange(0, _GROUP_M, layout=gl.SliceLayout(1, s_layout))
    limit = position + gl.minimum(pairs // GROUP, query_len - 1)
    seen_by_all = position + gl.minimum(first_pair // GROUP, query_len - 1) + 1
    last = position + gl.minimum((first_pair + _GROUP_M - 1) // GROUP, query_len - 1)
    row_max = gl.full([_GROUP_M], float("-inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
    row_sum = gl.full([_GROUP_M], 0.0, gl.float32, layout=gl.SliceLayout(1, s_layout))
    zeros = gl.zeros([_GROUP_M, BLOCK_N], gl.float32, layout=s_layout)
    stage = done % STAGES
    mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
    scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(stage))
    weights, _, row_max, row_sum = _softmax(scores, row_max, row_sum, scale_log2, limit, 0, True)
    weights = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, o_layout, 2))
    acc = gl.zeros([_GROUP_M, HEAD_DIM], gl.float32, layout=o_layout)
    state = (acc, weights, row_max, row_sum)
    for i in range(1, seen_by_all // BLOCK_N):
        state = _step(i, done, state, q, sums, keys, values, scale_log2, limit, False)
    for i in range(gl.maximum(seen_by_all // BLOCK_N, 1), last // BLOCK_N + 1):
        state = _step(i, done, state, q, sums, keys, values, scale_log2, limit, True)
    acc, weights, row_max, row_sum = state
    final = done + last // BLOCK_N
    mbarrier.wait(v_full.index(final % STAGES), (final // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(final % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(final % STAGES))
    # What else there is, is for the other group alone.
    for skipped in range(final + 1, done + num_tiles):
        mbarrier.wait(k_full.index(skipped % STAGES), (skipped // STAGES) & 1)
        mbarrier.arrive(k_empty.index(skipped % STAGES))
        mbarrier.wait(v_full.index(skipped % STAGES), (skipped // STAGES) & 1)
        mbarrier.arrive(v_empty.index(skipped % STAGES))

    # The queries are not needed any more: through their place, whole rows of results are stored by each few threads.
    acc = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, o_layout))[:, None]
    q.store(acc.to(q.dtype))
    pairs = first_pair + gl.arange(0, _GROUP_M, layout=gl.SliceLayout(1, out_layout))
    head = (query_begin + pairs // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + pairs % GROUP
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, out_layout))
    offsets = head[:, None] * HEAD_DIM + dims[None, :]
    gl.store(out_ptr + offsets, q.load(out_layout), mask=(pairs < query_len * GROUP)[:, None])


@gluon.jit
def _attend(
    INDEX: gl.constexpr,
    out_ptr: gl.tensor,
    queries: gl.tuple,
    all_sums: gl.shared_memory_descriptor,
    work: gl.tuple,
    keys: gl.tuple,
    values: gl.tuple,
    scale_log2: gl.tensor,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
) -> None:
    """The part of a group of warps, of this index: its 64 pairs of every piece of work the program takes."""
    q_tiles, q_full, q_empty = queries
    turn = 0
    done = 0
    num_tiles = 1
    while num_tiles > 0:
        told = hear(turn, work)
        num_tiles = at(told, NUM_TILES)
        if num_tiles > 0:
            now = turn % PIECES
            first_pair = at(told, FIRST_PAIR) + INDEX * _GROUP_M
            row = (at(told, QUERY_BEGIN), at(told, QUERY_LEN), at(told, POSITION))
            piece = (row[0], row[1], row[2], first_pair, at(told, KV_HEAD), num_tiles)
            mbarrier.wait(q_full.index(now), (turn // PIECES) & 1)
            # fmt: off
            _attend_piece(
                q_tiles.index(2 * now + INDEX), all_sums.index(INDEX), keys, values, out_ptr, scale_log2, piece, done,
                GROUP, KV_HEADS,
            )
            # fmt: on
            mbarrier.arrive(q_empty.index(now))
        turn += 1
        done += num_tiles


@gluon.jit(do_not_specialize=["num_rows", "num_slots"])
def _hopper_prefill_kernel(
    q_ptr: gl.tensor,
    k_slots: tma.tensor_descriptor,
    v_slots: tma.tensor_descriptor,
    v_cache_ptr: gl.tensor,
    block_tables_ptr: gl.tensor,
    row_slots_ptr: gl.tensor,
    query_start_ptr: gl.tensor,
    seq_lens_ptr: gl.tensor,
    out_ptr: gl.tensor,
    counter_ptr: gl.tensor,
    scale_log2: gl.tensor,
    num_rows: gl.tensor,
    num_slots: gl.tensor,
    block_table_width: gl.tensor,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """One program a processor. counter_ptr points at a zero, and again afterwards."""
    dtype: gl.constexpr = k_slots.dtype
    layout: gl.constexpr = k_slots.layout
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(dtype, [PIECES * 2, _GROUP_M, HEAD_DIM], layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    all_sums = gl.allocate_shared_memory(gl.float32, [2, _GROUP_M], plain)
    places = gl.allocate_shared_memory(gl.int32, [PIECES, 8], plain)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    q_full = gl.allocate_shared_memory(gl.int64, [PIECES, 1], barriers)
    q_empty = gl.allocate_shared_memory(gl.int64, [PIECES, 1], barriers)
    told = gl.allocate_shared_memory(gl.int64, [PIECES, 1], barriers)
    heard = gl.allocate_shared_memory(gl.int64, [PIECES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    for piece in gl.static_range(PIECES):
        mbarrier.init(q_full.index(piece), count=1)
        mbarrier.init(q_empty.index(piece), count=2)
        mbarrier.init(told.index(piece), count=1)
        mbarrier.init(heard.index(piece), count=4)  # by both groups and both loaders
    fence_async_shared()
    queries = (q_tiles, q_full, q_empty)
    keys = (k_tiles, k_full, k_empty)
    values = (v_tiles, v_full, v_empty)
    work = (places, told, heard)
    rows = (row_slots_ptr, query_start_ptr, seq_lens_ptr, num_rows)
    tables = (block_tables_ptr, num_slots, block_table_width)
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (0, out_ptr, queries, all_sums, work, keys, values, scale_log2, GROUP, KV_HEADS)),
            (_attend, (1, out_ptr, queries, all_sums, work, keys, values, scale_log2, GROUP, KV_HEADS)),
            (find_work, (q_ptr, rows, counter_ptr, work, queries, GROUP, KV_HEADS, 2 * _GROUP_M, BLOCK_N)),
            (load_tiles, (k_slots, v_cache_ptr, tables, work, keys, KV_HEADS, False)),
            (load_tiles, (v_slots, v_cache_ptr, tables, work, values, KV_HEADS, True)),
        ],
        [4, 1, 1, 1],
        [_GROUP_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS],
    )
    # fmt: on
