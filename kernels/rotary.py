"""Rotary position embedding (Su et al., arXiv 2104.09864) in the halves layout of GPT-NeoX and transformers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k rotated to their tokens' positions, as new contiguous tensors.

    Dimension i < D_rot / 2 of a head is paired with dimension i + D_rot / 2; dimensions from D_rot on are copied.
    Computed in float32 and rounded once.

    q: [T, H, D] and k: [T, K, D]; heads and dimensions are contiguous, a token's stride is free (views of a fused
    projection, say). positions: [T] int32. cos_sin: [P, D_rot] float32, cosines in the first D_rot / 2 columns and
    sines in the others.
    """
    if q.is_cuda:
        return rotary_embedding_triton(q, k, positions, cos_sin)
    return rotary_embedding_reference(q, k, positions, cos_sin)


def rotary_embedding_reference(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_embedding` in plain PyTorch."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def rotary_embedding_triton(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_embedding` by a Triton kernel."""
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    q_out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty((num_tokens, kv_heads, head_dim), dtype=k.dtype, device=k.device)
    half = cos_sin.shape[1] // 2
    _rotary_kernel[(num_tokens,)](
        q,
        k,
        positions,
        cos_sin,
        q_out,
        k_out,
        q.stride(0),
        k.stride(0),
        num_heads,
        kv_heads,
        head_dim,
        half,
        triton.next_power_of_2(num_heads),
        triton.next_power_of_2(kv_heads),
        triton.next_power_of_2(half),
        triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        num_warps=4,
    )
    return q_out, k_out


@triton.jit
def _rotary_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """One token's heads. BLOCK_REST is 0 where all dimensions of a head are rotated."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_HALF)
    cos_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * 2 * HALF
    cos = tl.load(cos_ptr + dims, mask=dims < HALF, other=0.0)
    sin = tl.load(cos_ptr + HALF + dims, mask=dims < HALF, other=0.0)
    q_token, q_out_token = q_ptr + token * q_stride, q_out_ptr + token * Q_HEADS * HEAD_DIM
    k_token, k_out_token = k_ptr + token * k_stride, k_out_ptr + token * K_HEADS * HEAD_DIM
    _rotate_heads(q_token, q_out_token, cos, sin, Q_HEADS, HEAD_DIM, HALF, BLOCK_Q_HEADS, BLOCK_HALF, BLOCK_REST)
    _rotate_heads(k_token, k_out_token, cos, sin, K_HEADS, HEAD_DIM, HALF, BLOCK_K_HEADS, BLOCK_HALF, BLOCK_REST)


@triton.jit
def _rotate_heads(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    offsets = heads * HEAD_DIM + dims
    mask = (heads < HEADS) & (dims < HALF)
    first = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, first * cos[None, :] - second * sin[None, :], mask=mask)
    tl.store(out_ptr + HALF + offsets, second * cos[None, :] + first * sin[None, :], mask=mask)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        rest_mask = (heads < HEADS) & (rest < HEAD_DIM)
        tl.store(
            out_ptr + heads * HEAD_DIM + rest,
            tl.load(x_ptr + heads * HEAD_DIM + rest, mask=rest_mask, other=0.0),
            mask=rest_mask,
        )
