"""The loop of the Triton decode kernel: online softmax over tiles of keys read through a block table.

The softmax is that of Milakov & Gimelshein (arXiv 1805.02867) as in FlashAttention (arXiv 2205.14135), in base 2:
scores are scaled by log2(e) so that exponentials are exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    q: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    scale_log2: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold tokens first to last of one row and KV head into (acc, row_max, row_sum) and return them.

    q: [M, BLOCK_D], zero past HEAD_DIM. acc: [M, BLOCK_D] float32, weighted sums of values. row_max, row_sum: [M]
    float32, largest scores and sums of weights.
    k_ptr, v_ptr point at the KV head within slot 0 of the caches, table_ptr at the row's block table.
    There is at least one token.
    UPCAST: multiply in float32, for the interpreter, whose dot of bfloat16 is wrong.
    """
    dims = tl.arange(0, BLOCK_D)
    for start in range(first, last, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        # What lies past the end may be NaN or an invalid block id: it is never loaded.
        present = tokens < last
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=present, other=0)
        mask = present[:, None] & (dims < HEAD_DIM)[None, :]
        slots = blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        offsets = slots[:, None] * TOKEN_STRIDE + dims[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)

        # "tf32x3" concerns float32 alone: three products of TF32 parts have its precision, one has not.
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale_log2
        scores = tl.where(present[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="tf32x3")
        row_max = new_max
    return acc, row_max, row_sum
