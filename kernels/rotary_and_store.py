"""What happens to queries, keys and values between their projection and attention, in one pass over them.

Norm of each query and key head where the model has it, rotation to the token's position, and storing of keys and values
in the paged cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.launch import dependent_launch, launch
from paceline.kernels.rms_norm import rms_norm_reference

_HEADS_PER_PROGRAM = 8


@dataclass(frozen=True)
class HeadPlaces:
    """What becomes of a step's T queries, keys and values: norm, rotation, and a place for keys and values."""

    q_norm: torch.Tensor | None
    """[D], the weight of a root-mean-square norm over each query head; None where the model has none."""
    k_norm: torch.Tensor | None
    """The same of each key head; both or neither."""
    eps: float
    """Of these norms."""
    positions: torch.Tensor
    """[T] int32."""
    cos_sin: torch.Tensor
    """[P, D_rot] float32: cosines in the first D_rot / 2 columns and sines in the others. Dimension i < D_rot / 2 of a
    head turns with dimension i + D_rot / 2, and those from D_rot on stay."""
    k_cache: torch.Tensor
    """[NB, BS, K, D], contiguous, as v_cache is."""
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    """[T] int64, block_id * BS + offset; no slot twice; -1 stores nothing."""


def rotary_and_store(qkv: torch.Tensor, heads: HeadPlaces) -> torch.Tensor:
    """Return the queries [T, H, D] ready for attention; keys and values go to their places in the caches.

    qkv: [T, (H + 2 * K) * D], contiguous: heads of queries, then of keys, then of values.
    """
    return rotary_and_store_triton(qkv, heads) if qkv.is_cuda else rotary_and_store_reference(qkv, heads)


def rotary_and_store_reference(qkv: torch.Tensor, heads: HeadPlaces) -> torch.Tensor:
    """`rotary_and_store` in plain PyTorch."""
    kv_heads, head_dim = heads.k_cache.shape[2:]
    apart = qkv.unflatten(-1, (-1, head_dim))
    query, key, value = apart.split((apart.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if heads.q_norm is not None and heads.k_norm is not None:
        query = rms_norm_reference(query, heads.q_norm, heads.eps)
        key = rms_norm_reference(key, heads.k_norm, heads.eps)
    cos, sin = heads.cos_sin.index_select(0, heads.positions).unsqueeze(1).chunk(2, dim=-1)
    store_kv(rotate(key, cos, sin), value, heads.k_cache, heads.v_cache, heads.slot_mapping)
    return rotate(query, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first dimensions of heads x [T, H, D], in float32, rounded once; cos and sin are [T, 1, D_rot / 2]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def store_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write keys and values [T, K, D] to their slots of the caches."""
    stored = slot_mapping >= 0
    if not stored.all():
        key, value, slot_mapping = key[stored], value[stored], slot_mapping[stored]
    k_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping, key)
    v_cache.view(-1, *value.shape[1:]).index_copy_(0, slot_mapping, value)


def rotary_and_store_triton(qkv: torch.Tensor, heads: HeadPlaces) -> torch.Tensor:
    """`rotary_and_store` by a Triton kernel."""
    num_tokens = qkv.shape[0]
    kv_heads, head_dim = heads.k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim
    query = torch.empty((num_tokens, num_heads - 2 * kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    half = heads.cos_sin.shape[1] // 2
    pdl = dependent_launch(qkv.device)
    launch(
        _rotary_and_store_kernel,
        (num_tokens, -(-num_heads // _HEADS_PER_PROGRAM)),
        qkv,
        qkv if heads.q_norm is None else heads.q_norm,
        qkv if heads.k_norm is None else heads.k_norm,
        heads.positions,
        heads.cos_sin,
        heads.slot_mapping,
        query,
        heads.k_cache,
        heads.v_cache,
        heads.eps,
        num_heads - 2 * kv_heads,
        kv_heads,
        head_dim,
        half,
        _HEADS_PER_PROGRAM,
        1 << (half - 1).bit_length(),
        1 << (head_dim - 2 * half - 1).bit_length() if head_dim > 2 * half else 0,
        heads.q_norm is not None,
        pdl,
        num_warps=4,
        dependent=pdl,
    )
    return query


@triton.jit
def _rotary_and_store_kernel(
    qkv_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    query_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    eps: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """BLOCK_HEADS heads of one token, of whichever kind. BLOCK_REST is 0 where all dimensions of a head turn."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_query = head < Q_HEADS
    is_value = head >= Q_HEADS + KV_HEADS
    dims = tl.arange(0, BLOCK_HALF)
    turned = dims < HALF
    if PDL:
        gdc_launch_dependents()
    # The step's first kernel made these; this one's only newer input is qkv.
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    cos = tl.load(cos_sin_ptr + position * 2 * HALF + dims, mask=turned, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * 2 * HALF + HALF + dims, mask=turned, other=0.0)[None, :]
    if NORM:
        weight_ptr = tl.where(is_query[:, None], q_norm_ptr, k_norm_ptr)
        first_weight = tl.load(weight_ptr + dims[None, :], mask=turned[None, :], other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HALF + dims[None, :], mask=turned[None, :], other=0.0).to(tl.float32)
    # Where each head goes: to the queries, or to the token's place in a cache.
    kv_head = tl.where(is_value, head - Q_HEADS - KV_HEADS, head - Q_HEADS)
    query_out = query_ptr + (token * Q_HEADS + head) * HEAD_DIM
    k_out = k_cache_ptr + (slot * KV_HEADS + kv_head) * HEAD_DIM
    v_out = v_cache_ptr + (slot * KV_HEADS + kv_head) * HEAD_DIM
    real = head < Q_HEADS + 2 * KV_HEADS
    out = tl.where(is_query, query_out, tl.where(is_value, v_out, k_out))
    stored = real & (is_query | (slot >= 0))
    x_ptr = qkv_ptr + (token * (Q_HEADS + 2 * KV_HEADS) + head)[:, None] * HEAD_DIM
    mask = real[:, None] & turned[None, :]
    if PDL:
        gdc_wait()
    x_first = tl.load(x_ptr + dims[None, :], mask=mask, other=0.0)
    x_second = tl.load(x_ptr + HALF + dims[None, :], mask=mask, other=0.0)
    first, second = x_first.to(tl.float32), x_second.to(tl.float32)
    if BLOCK_REST > 0:
        rest_dims = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        rest_mask = real[:, None] & (rest_dims < HEAD_DIM)
        rest = tl.load(x_ptr + rest_dims, mask=rest_mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        if BLOCK_REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        # Rounded as the norm and its weight are where they are operations of their own.
        first = ((first * scale).to(x_first.dtype).to(tl.float32) * first_weight).to(x_first.dtype).to(tl.float32)
        second = ((second * scale).to(x_first.dtype).to(tl.float32) * second_weight).to(x_first.dtype).to(tl.float32)
        if BLOCK_REST > 0:
            rest_weight = tl.load(weight_ptr + rest_dims, mask=rest_dims < HEAD_DIM, other=0.0).to(tl.float32)
            normed = (rest * scale).to(x_first.dtype).to(tl.float32) * rest_weight
            rest = tl.where(is_value[:, None], rest, normed)
    keep = is_value[:, None]
    stored_mask = stored[:, None] & turned[None, :]
    turned_first = tl.where(keep, x_first.to(tl.float32), first * cos - second * sin)
    turned_second = tl.where(keep, x_second.to(tl.float32), second * cos + first * sin)
    tl.store(out[:, None] + dims[None, :], turned_first.to(x_first.dtype), mask=stored_mask)
    tl.store(out[:, None] + HALF + dims[None, :], turned_second.to(x_first.dtype), mask=stored_mask)
    if BLOCK_REST > 0:
        tl.store(out[:, None] + rest_dims, rest.to(x_first.dtype), mask=stored[:, None] & (rest_dims < HEAD_DIM))
