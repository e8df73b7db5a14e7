"""Putting the results of a row's chunks together in the Hopper decode kernel, by the program that has the last chunk.

Programs tell each other their results through the L2 cache. That one has arrived is seen by the result itself, which
is then no longer the mark that was there before: one way through the cache, while a count of arrivals would take a
fence and three. Whoever waits has the last chunk, and pieces of work are in such an order that its row's other chunks
are taken up no later, by programs that all run at once: none waits for one that cannot come.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CHUNKS_AT_ONCE = gl.constexpr(8)
"""Chunks whose results are looked at together."""
ABSENT = gl.constexpr(-1)
"""The mark: bits of a NaN that is not the one that arithmetic makes."""
_NAN = gl.constexpr(0x7FFFFFFF)
_wait_for_each_other = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # 3.6 has another name


@gluon.jit
def tell(ptr: gl.tensor, values: gl.tensor, mask: gl.tensor) -> None:
    """Store float32 values to words that hold the mark."""
    bits = values.to(gl.int32, bitcast=True)
    gl.store(ptr, gl.where(bits == ABSENT, _NAN, bits), mask=mask)


@gluon.jit
def combine(
    partial_ptr: gl.tensor,
    log_sums_ptr: gl.tensor,
    out_ptr: gl.tensor,
    first_share: gl.tensor,
    num_chunks: gl.tensor,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
) -> None:
    """Average a group's results over the chunks of its row, as they arrive, and put the marks back.

    partial [W, H, D] is told them and log_sums [W, H] the base-2 logarithms of their softmax denominators, by which
    they are weighted; first_share is the index of the first chunk and head. out_ptr points at the group's first head.
    """
    # A warp has a head, and each thread some of its dimensions, of all chunks: so no thread needs what another has.
    MEMBERS: gl.constexpr = 4
    layout: gl.constexpr = gl.BlockedLayout([1, 1, HEAD_DIM // 32], [1, 1, 32], [1, MEMBERS, 1], [2, 1, 0])
    of_shares: gl.constexpr = gl.SliceLayout(2, layout)
    of_out: gl.constexpr = gl.SliceLayout(0, layout)
    chunk_places = gl.arange(0, CHUNKS_AT_ONCE, layout=gl.SliceLayout(1, of_shares))
    member_places = gl.arange(0, MEMBERS, layout=gl.SliceLayout(0, of_shares))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    out_members = gl.arange(0, MEMBERS, layout=gl.SliceLayout(1, of_out))
    out_dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, of_out))
    for first_member in gl.static_range(0, GROUP, MEMBERS):
        acc = gl.zeros([MEMBERS, HEAD_DIM], gl.float32, layout=of_out)
        total = gl.zeros([MEMBERS, 1], gl.float32, layout=of_out)
        largest = gl.full([MEMBERS, 1], float("-inf"), gl.float32, layout=of_out)
        for start in range(0, num_chunks, CHUNKS_AT_ONCE):
            chunks = start + chunk_places
            members = first_member + member_places
            real = (chunks < num_chunks)[:, None] & (members < GROUP)[None, :]
            share = first_share + chunks[:, None] * (KV_HEADS * GROUP) + members[None, :]
            sums_ptr = log_sums_ptr + share
            own_ptr = partial_ptr + share[:, :, None] * HEAD_DIM + dims[None, None, :]
            mask = real[:, :, None] & (dims >= 0)[None, None, :]
            sum_bits, bits, absent = _look(sums_ptr, own_ptr, real, mask)
            while absent > 0:
                sum_bits, bits, absent = _look(sums_ptr, own_ptr, real, mask)
            log_sums = gl.where(real, sum_bits.to(gl.float32, bitcast=True), float("-inf"))[:, :, None]
            new_largest = gl.maximum(largest, gl.max(log_sums, axis=0))
            safe = gl.where(new_largest == float("-inf"), 0.0, new_largest)  # of members past the group
            weights = gl.exp2(log_sums - safe[None, :, :])
            rescale = gl.exp2(largest - safe)
            total = total * rescale + gl.sum(weights, axis=0)
            acc = acc * rescale + gl.sum(bits.to(gl.float32, bitcast=True) * weights, axis=0)
            largest = new_largest
            _wait_for_each_other()  # Many threads look at the same logarithm.
            gl.store(sums_ptr, gl.full([CHUNKS_AT_ONCE, MEMBERS], ABSENT, gl.int32, layout=of_shares), mask=real)
            marks = gl.full([CHUNKS_AT_ONCE, MEMBERS, HEAD_DIM], ABSENT, gl.int32, layout=layout)
            gl.store(own_ptr, marks, mask=mask)
        offsets = (first_member + out_members)[:, None] * HEAD_DIM + out_dims[None, :]
        stored = (first_member + out_members < GROUP)[:, None] & (out_dims >= 0)[None, :]
        gl.store(out_ptr + offsets, (acc / total).to(out_ptr.dtype.element_ty), mask=stored)


@gluon.jit
def _look(
    sums_ptr: gl.tensor, own_ptr: gl.tensor, real: gl.tensor, mask: gl.tensor
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Return the words of logarithms and results, and 1 where any is absent yet."""
    sum_bits = gl.load(sums_ptr, mask=real, other=0, volatile=True)
    bits = gl.load(own_ptr, mask=mask, other=0, volatile=True)
    absent = (bits == ABSENT) | (sum_bits == ABSENT)[:, :, None]
    return sum_bits, bits, gl.max(gl.max(gl.max(absent.to(gl.int32), axis=0), axis=1), axis=0)
