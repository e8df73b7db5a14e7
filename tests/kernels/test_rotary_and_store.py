"""Norm, rotation and storing of queries, keys and values in one pass, against the operations one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from paceline.kernels.rotary_and_store import HeadPlaces, rotary_and_store_reference, rotary_and_store_triton

_NAN = float("nan")


def table(positions: int, rotated: int) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def test_reference_is_the_rotation_of_transformers() -> None:
    qkv, positions = torch.randn(5, (4 + 2 * 2) * 16), torch.tensor([0, 7, 3, 31, 8], dtype=torch.int32)
    cos_sin = table(32, 16)
    caches = torch.full((2, 4, 8, 2, 16), _NAN)
    slots = torch.tensor([9, 0, 31, -1, 8])
    query = rotary_and_store_reference(
        qkv, HeadPlaces(None, None, 1e-6, positions, cos_sin, caches[0], caches[1], slots)
    )
    q, k, v = qkv.view(5, 8, 16).split((4, 2, 2), dim=1)
    cos, sin = (part[positions].repeat(1, 2) for part in cos_sin.chunk(2, dim=-1))
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    torch.testing.assert_close(query, expected_q)
    stored = slots >= 0
    torch.testing.assert_close(caches[0].view(-1, 2, 16)[slots[stored]], expected_k[stored])
    assert torch.equal(caches[1].view(-1, 2, 16)[slots[stored]], v[stored])
    assert caches.isnan().sum() == caches.numel() - 2 * 4 * 2 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated"), [(9, 3, 64, 64), (4, 4, 16, 16), (6, 2, 80, 80), (5, 1, 64, 16)]
)
def test_kernel(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
    norm: bool,
    dtype: torch.dtype,
    device: torch.device,
    assert_rounded: Callable[..., None],
) -> None:
    num_tokens = 5
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    weights = [torch.rand(head_dim).to(dtype) + 0.5 for _ in range(2)] if norm else [None, None]
    positions = torch.tensor([0, 70, 3, 31, 8], dtype=torch.int32)
    slots = torch.tensor([33, 0, 47, -1, 8])
    cos_sin = table(100, rotated)
    caches = torch.full((2, 3, 16, kv_heads, head_dim), _NAN, dtype=dtype)
    expected_caches = caches.clone()
    places = HeadPlaces(*weights, 1e-6, positions, cos_sin, *expected_caches, slots)
    expected = rotary_and_store_reference(qkv, places)
    caches = caches.to(device)
    on_device = (None if weight is None else weight.to(device) for weight in weights)
    tables = positions.to(device), cos_sin.to(device)
    places = HeadPlaces(*on_device, 1e-6, *tables, *caches, slots.to(device))
    query = rotary_and_store_triton(qkv.to(device), places)
    # A rotated value is a difference of two rounded ones, which may nearly cancel.
    roundings = 4 if dtype == torch.bfloat16 else 8
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(query.cpu(), expected, rtol=roundings * eps, atol=roundings * eps)
    torch.testing.assert_close(
        caches[0].cpu(), expected_caches[0], rtol=roundings * eps, atol=roundings * eps, equal_nan=True
    )
    torch.testing.assert_close(caches[1].cpu(), expected_caches[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_slots_far_into_a_large_cache() -> None:
    """Offsets beyond 2**31."""
    num_blocks = 2**31 // (16 * 1024) + 8
    caches = torch.zeros(2, num_blocks, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    qkv = torch.randn(1, 10 * 128 + 8 * 128, device="cuda").to(torch.bfloat16)
    slot = torch.tensor([num_blocks * 16 - 1], device="cuda")
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    rotary_and_store_triton(qkv, HeadPlaces(None, None, 1e-6, zero, table(4, 128).cuda(), *caches, slot))
    assert torch.equal(caches[1].view(-1, 1024)[-1], qkv[0, -1024:])
    assert torch.equal(caches[0].view(-1, 1024)[-1], qkv[0, -2048:-1024])
