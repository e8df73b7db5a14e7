"""Scatter a step's keys and values into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write token t's key and value at slot_mapping[t] of the caches, in place.

    k, v: [T, K, D]; heads and dimensions are contiguous, a token's stride is free. k_cache, v_cache: [NB, BS, K, D],
    contiguous. slot_mapping: [T] int64, block_id * BS + offset; no slot twice; -1 writes nothing.
    """
    if k.is_cuda:
        store_kv_triton(k, v, k_cache, v_cache, slot_mapping)
    else:
        store_kv_reference(k, v, k_cache, v_cache, slot_mapping)


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`store_kv` in plain PyTorch."""
    stored = slot_mapping >= 0
    if not stored.all():
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def store_kv_triton(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`store_kv` by a Triton kernel."""
    size = k.shape[1] * k.shape[2]
    _store_kv_kernel[(k.shape[0],)](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0), size, triton.next_power_of_2(size), num_warps=4
    )


@triton.jit
def _store_kv_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One token; SIZE elements of key and as many of value."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    columns = tl.arange(0, BLOCK)
    mask = (columns < SIZE) & (slot >= 0)
    k = tl.load(k_ptr + token * k_stride + columns, mask=mask)
    v = tl.load(v_ptr + token * v_stride + columns, mask=mask)
    tl.store(k_cache_ptr + slot * SIZE + columns, k, mask=mask)
    tl.store(v_cache_ptr + slot * SIZE + columns, v, mask=mask)
