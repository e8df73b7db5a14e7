"""The kernel of `paged_decode_attention` for Hopper GPUs, in Gluon (Triton's language of explicit layouts).

Keys and values are a stream from memory that must not break off: not between rows, and not between two kernels. One
warp of a program does nothing but keep the tensor memory accelerator busy: it goes ahead, through piece after piece of
the program's work, as far as there is room in shared memory, and begins while the kernel before still runs, which
writes no more than the newest token of each row. The other four warps multiply: keys are the first matrix of the
tensor cores, which take 64 rows of it, but as few columns of the second as 8 query heads of a KV head.
"""

from __future__ import annotations

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.decode_work import BLOCK_N, UNALIGNED, DecodeWork
from paceline.kernels.gluon_names import HALF, in_parts
from paceline.kernels.launch import launch, num_processors
from paceline.kernels.paged_decode_combine_hopper import combine_if_last
from paceline.kernels.paged_decode_loader_hopper import RUN, find_piece, stream_pieces
from paceline.kernels.paged_prefill_attention_hopper import fits_hopper_kernel
from paceline.kernels.tensor_descriptors import describe

_LOADER_REGISTERS = gl.constexpr(56)
STAGES = 3
PROGRAMS_PER_PROCESSOR = 2
MAX_REGISTERS = 96


def fits_hopper_decode(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Return whether this kernel takes such queries, [T, H, D], and caches, [NB, BS, K, D], on their device."""
    return fits_hopper_kernel(q, k_cache) and q.shape[1] // k_cache.shape[2] <= 16


def paged_decode_attention_hopper(
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
    """`paged_decode_attention` by a Gluon kernel, for what `fits_hopper_decode`."""
    num_heads, head_dim = q.shape[1:]
    num_blocks, block_size, kv_heads = k_cache.shape[:3]
    group = num_heads // kv_heads
    pieces = work.rows.shape[0]
    shape = (num_blocks * block_size, kv_heads * head_dim)
    k_slots, v_slots = (
        describe(cache, shape, (kv_heads * head_dim, 1), (RUN.value, HALF.value)) for cache in (k_cache, v_cache)
    )
    launch(
        _hopper_decode_kernel,
        (min(pieces * kv_heads, PROGRAMS_PER_PROCESSOR * num_processors(q.device)),),
        q,
        k_slots,
        v_slots,
        k_cache,
        v_cache,
        block_tables,
        row_slots,
        query_start,
        seq_lens,
        work.rows,
        work.chunks,
        work.firsts,
        work.chunk_len,
        work.arrivals,
        torch.empty((pieces, num_heads, head_dim), dtype=torch.float32, device=q.device),
        torch.empty((pieces, num_heads), dtype=torch.float32, device=q.device),
        out,
        scale * math.log2(math.e),
        pieces,
        num_blocks * block_size,
        block_tables.shape[1],
        group,
        kv_heads,
        block_size,
        head_dim,
        max(8, triton.next_power_of_2(group)),
        BLOCK_N,
        STAGES,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        dependent=True,
    )


@gluon.jit
def _find_newest(table_ptr: gl.tensor, seq_len: gl.tensor, BLOCK_SIZE: gl.constexpr) -> gl.tensor:
    """Return the slot, int64, of the first token of the run that holds a row's newest one."""
    first = (seq_len - 1) // RUN * RUN
    return gl.load(table_ptr + first // BLOCK_SIZE).to(gl.int64) * BLOCK_SIZE + first % BLOCK_SIZE


@gluon.jit
def _load_newest(
    cache_ptr: gl.tensor, slot: gl.tensor, last: gl.tensor, seq_len: gl.tensor, column: gl.tensor,
    STRIDE: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Return HALF elements of each of the run of tokens that holds a row's newest one, [RUN, HALF], zero past that.

    Nothing is loaded for chunks that end before that.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    first = (seq_len - 1) // RUN * RUN
    rows = gl.arange(0, RUN, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    offsets = (slot + rows)[:, None] * STRIDE + column + dims[None, :]
    return gl.load(cache_ptr + offsets, mask=((first + rows < seq_len) & (last == seq_len))[:, None], other=0.0)


@gluon.jit
def _attend_pieces(
    q_ptr: gl.tensor,
    k_cache_ptr: gl.tensor,
    v_cache_ptr: gl.tensor,
    out_ptr: gl.tensor,
    scale_log2: gl.tensor,
    rows: gl.tuple,
    chunk_len_ptr: gl.tensor,
    results: gl.tuple,
    tiles: gl.tuple,
    q_tile: gl.shared_memory_descriptor,
    weights_tile: gl.shared_memory_descriptor,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> None:
    """The part of the four warps that multiply: all pieces of the program's work."""
    k_tiles, v_tiles, full, empty = tiles
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    BLOCK_G: gl.constexpr = q_tile.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_G, 16])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    out_layout: gl.constexpr = gl.BlockedLayout([HEAD_DIM // 32, 1], [32, 1], [1, 4], [0, 1])
    partial_ptr, log_sums_ptr, arrivals_ptr = results
    members = gl.arange(0, BLOCK_G, layout=gl.SliceLayout(1, q_layout))
    q_dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, q_layout))
    q_offsets = members[:, None] * HEAD_DIM + q_dims[None, :]
    out_members = gl.arange(0, BLOCK_G, layout=gl.SliceLayout(0, out_layout))
    out_offsets = (
        out_members[None, :] * HEAD_DIM + gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, out_layout))[:, None]
    )
    tokens = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    zeros = gl.zeros([BLOCK_N, BLOCK_G], gl.float32, layout=layout)

    chunk_len = gl.load(chunk_len_ptr)
    done = 0
    turn = 0
    row, kv_head, chunk, first_of_row, seq_len, table_ptr, token = find_piece(turn, rows, KV_HEADS)
    newest = _find_newest(table_ptr, seq_len, BLOCK_SIZE)
    if (row >= 0) | (gl.program_id(0) == 0):  # the kernel as a whole must not end before the one it depends on
        gdc_wait()
    while row >= 0:
        last = gl.minimum((chunk + 1) * chunk_len, seq_len)
        group = (token * KV_HEADS + kv_head) * GROUP
        q_tile.store(gl.load(q_ptr + group * HEAD_DIM + q_offsets, mask=(members < GROUP)[:, None], other=0.0))
        column = kv_head * HEAD_DIM
        STRIDE: gl.constexpr = KV_HEADS * HEAD_DIM
        k_new = _load_newest(k_cache_ptr, newest, last, seq_len, column, STRIDE)
        v_new = _load_newest(v_cache_ptr, newest, last, seq_len, column, STRIDE)
        if HEAD_DIM > HALF:
            k_rest = _load_newest(k_cache_ptr, newest, last, seq_len, column + HALF, STRIDE)
            v_rest = _load_newest(v_cache_ptr, newest, last, seq_len, column + HALF, STRIDE)
        fence_async_shared()
        acc = gl.zeros([HEAD_DIM, BLOCK_G], gl.float32, layout=layout)
        sums = gl.zeros([BLOCK_N, BLOCK_G], gl.float32, layout=layout)
        row_max = gl.full([BLOCK_G], float("-inf"), gl.float32, layout=gl.SliceLayout(0, layout))
        for start in range(chunk * chunk_len, last, BLOCK_N):
            stage = done % STAGES
            mbarrier.wait(full.index(stage), (done // STAGES) & 1)
            if start + BLOCK_N >= seq_len:
                # The accelerator may have been there before the newest token was; and past that are no numbers.
                run = (seq_len - 1 - start) // RUN
                in_parts(k_tiles.index(stage), RUN).index(run).store(k_new)
                in_parts(v_tiles.index(stage), RUN).index(run).store(v_new)
                if HEAD_DIM > HALF:
                    in_parts(k_tiles.index(stage), RUN).index(BLOCK_N // RUN + run).store(k_rest)
                    in_parts(v_tiles.index(stage), RUN).index(BLOCK_N // RUN + run).store(v_rest)
                fence_async_shared()
            scores = warpgroup_mma(k_tiles.index(stage), q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores = gl.where((start + tokens < last)[:, None], scores * scale_log2, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(scores, axis=0))
            weights = gl.exp2(scores - new_max[None, :])
            rescale = gl.exp2(row_max - new_max)
            row_max = new_max
            sums = sums * rescale[None, :] + weights
            acc = acc * rescale[None, :]
            weights_tile.permute((1, 0)).store(weights.to(weights_tile.dtype))
            fence_async_shared()
            acc = warpgroup_mma(
                v_tiles.index(stage).permute((1, 0)), weights_tile.permute((1, 0)), acc, is_async=True
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage))
            done += 1
        row_sum = gl.sum(sums, axis=0)
        result = gl.convert_layout(acc / row_sum[None, :], out_layout)
        real = (out_members < GROUP)[None, :]
        num_chunks = (seq_len + chunk_len - 1) // chunk_len
        if num_chunks == 1:
            gl.store(out_ptr + group * HEAD_DIM + out_offsets, result.to(q_tile.dtype), mask=real)
        else:
            first_share = (first_of_row.to(gl.int64) * KV_HEADS + kv_head) * GROUP
            share = first_share + chunk * (KV_HEADS * GROUP)
            gl.store(partial_ptr + share * HEAD_DIM + out_offsets, result, mask=real)
            log_sum = gl.convert_layout(row_max + gl.log2(row_sum), gl.SliceLayout(0, out_layout))
            gl.store(log_sums_ptr + share + out_members, log_sum, mask=out_members < GROUP)
            combine_if_last(
                arrivals_ptr + row * KV_HEADS + kv_head, partial_ptr, log_sums_ptr, out_ptr + group * HEAD_DIM,
                first_share, num_chunks, GROUP, KV_HEADS, HEAD_DIM,
            )  # fmt: skip
        turn += 1
        row, kv_head, chunk, first_of_row, seq_len, table_ptr, token = find_piece(turn, rows, KV_HEADS)
        newest = _find_newest(table_ptr, seq_len, BLOCK_SIZE)


@gluon.jit(do_not_specialize=["num_slots", "num_pieces"], do_not_specialize_on_alignment=UNALIGNED)
def _hopper_decode_kernel(
    q_ptr: gl.tensor,
    k_slots: tma.tensor_descriptor,
    v_slots: tma.tensor_descriptor,
    k_cache_ptr: gl.tensor,
    v_cache_ptr: gl.tensor,
    block_tables_ptr: gl.tensor,
    row_slots_ptr: gl.tensor,
    query_start_ptr: gl.tensor,
    seq_lens_ptr: gl.tensor,
    rows_ptr: gl.tensor,
    chunks_ptr: gl.tensor,
    firsts_ptr: gl.tensor,
    chunk_len_ptr: gl.tensor,
    arrivals_ptr: gl.tensor,
    partial_ptr: gl.tensor,
    log_sums_ptr: gl.tensor,
    out_ptr: gl.tensor,
    scale_log2: gl.tensor,
    num_pieces: gl.tensor,
    num_slots: gl.tensor,
    block_table_width: gl.tensor,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_G: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """One of a few programs a processor, for every piece and KV head whose number it is by turns."""
    gdc_launch_dependents()
    dtype: gl.constexpr = k_slots.dtype
    layout: gl.constexpr = k_slots.layout
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_tile = gl.allocate_shared_memory(dtype, [BLOCK_G, HEAD_DIM], layout)
    weights_tile = gl.allocate_shared_memory(dtype, [BLOCK_G, BLOCK_N], layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    tiles = (k_tiles, v_tiles, full, empty)
    rows = (
        block_tables_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, rows_ptr, chunks_ptr, firsts_ptr, num_pieces,
        block_table_width,
    )  # fmt: skip
    results = (partial_ptr, log_sums_ptr, arrivals_ptr)
    # fmt: off
    gl.warp_specialize(
        [
            (_attend_pieces, (
                q_ptr, k_cache_ptr, v_cache_ptr, out_ptr, scale_log2, rows, chunk_len_ptr, results, tiles, q_tile,
                weights_tile,
                GROUP, KV_HEADS, BLOCK_SIZE,
            )),
            (stream_pieces, (k_slots, v_slots, rows, chunk_len_ptr, num_slots, tiles, KV_HEADS, BLOCK_SIZE)),
        ],
        [1],
        [_LOADER_REGISTERS],
    )
    # fmt: on
