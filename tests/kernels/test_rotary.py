"""Rotary embedding: transformers as the oracle of the reference, the reference as that of the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from paceline.kernels.rotary import rotary_embedding, rotary_embedding_reference, rotary_embedding_triton


def make_table(length: int, rotated_dims: int) -> torch.Tensor:
    angles = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(rotated_dims // 2) * 2 / rotated_dims)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def test_equals_transformers() -> None:
    q, k = torch.randn(6, 4, 64), torch.randn(6, 2, 64)
    positions = torch.tensor([0, 1, 99, 5, 5, 42], dtype=torch.int32)
    table = make_table(100, 64)
    cos, sin = (half[positions].repeat(1, 2).unsqueeze(0) for half in table.chunk(2, dim=1))
    expected = apply_rotary_pos_emb(q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos, sin)
    for rotated, oracle in zip(rotary_embedding(q, k, positions, table), expected, strict=True):
        torch.testing.assert_close(rotated, oracle.squeeze(0).transpose(0, 1))


def test_partial_rotation_copies_the_other_dimensions() -> None:
    q, k = torch.randn(3, 4, 64), torch.randn(3, 2, 64)
    positions, table = torch.arange(3, dtype=torch.int32), make_table(3, 16)
    rotated, _ = rotary_embedding(q, k, positions, table)
    expected, _ = rotary_embedding(q[..., :16], k[..., :16], positions, table)
    assert torch.equal(rotated, torch.cat((expected, q[..., 16:]), dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated_dims"),
    [(9, 3, 64, 64), (14, 2, 128, 128), (4, 4, 80, 80), (8, 1, 96, 24)],
)
def test_kernel_equals_reference(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated_dims: int,
    device: torch.device,
    assert_rounded: Callable[..., None],
) -> None:
    qkv = torch.randn(5, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    q = qkv[:, : heads * head_dim].view(5, heads, head_dim)
    k = qkv[:, heads * head_dim : (heads + kv_heads) * head_dim].view(5, kv_heads, head_dim)
    positions = torch.randint(200, (5,), dtype=torch.int32, device=device)
    table = make_table(200, rotated_dims).to(device)
    actual = rotary_embedding_triton(q, k, positions, table)
    for result, expected in zip(actual, rotary_embedding_reference(q, k, positions, table), strict=True):
        assert result.is_contiguous()
        assert_rounded(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large(dtype: torch.dtype, assert_rounded: Callable[..., None]) -> None:
    q, k = torch.randn(4096, 32, 128, device="cuda").to(dtype), torch.randn(4096, 8, 128, device="cuda").to(dtype)
    positions = torch.randint(8192, (4096,), dtype=torch.int32, device="cuda")
    table = make_table(8192, 128).cuda()
    actual = rotary_embedding(q, k, positions, table)
    for result, expected in zip(actual, rotary_embedding_reference(q, k, positions, table), strict=True):
        assert_rounded(result, expected)
