"""Decode attention over poisoned caches, against float64 attention a query at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.paged_decode_attention import (
    paged_decode_attention,
    paged_decode_attention_reference,
    paged_decode_attention_triton,
)

SHAPES = [(9, 3, 64), (14, 2, 64), (4, 2, 128), (8, 2, 80), (2, 2, 16), (5, 1, 96), (1, 1, 256)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, make_rows: Callable, assert_attention: Callable
) -> None:
    for seq_lens in ([1], [33, 33], [1, 16, 100, 65, 17]):
        rows = make_rows(seq_lens, kv_heads, head_dim, dtype, where=torch.device("cpu"))
        q = torch.randn(len(seq_lens), heads, head_dim).to(dtype)
        out = torch.empty_like(q)
        paged_decode_attention_reference(q, rows.k_cache, rows.v_cache, rows.block_tables, rows.seq_lens, 0.125, out)
        assert_attention(out, rows.expected(q, [1] * len(seq_lens), 0.125))


def test_reference_with_more_rows_than_it_gathers_at_once(make_rows: Callable, assert_attention: Callable) -> None:
    seq_lens = [2000, 3000, 2500, 1]
    rows = make_rows(seq_lens, 2, 128, torch.float32, where=torch.device("cpu"))
    q = torch.randn(4, 2, 128)
    out = paged_decode_attention(q, rows.k_cache, rows.v_cache, rows.block_tables, rows.seq_lens, 0.1, 3000)
    assert_attention(out, rows.expected(q, [1] * 4, 0.1))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    make_rows: Callable,
    assert_attention: Callable,
    device: torch.device,
) -> None:
    seq_lens = [1, 64, 100]
    rows = make_rows(seq_lens, kv_heads, head_dim, dtype)
    q = torch.randn(len(seq_lens), heads, head_dim, device=device).to(dtype)
    out = torch.empty_like(q)
    paged_decode_attention_triton(q, rows.k_cache, rows.v_cache, rows.block_tables, rows.seq_lens, 0.125, 1, out)
    assert_attention(out, rows.expected(q, [1] * len(seq_lens), 0.125))


@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_kernel_with_split_rows(
    splits: int, block_size: int, make_rows: Callable, assert_attention: Callable, device: torch.device
) -> None:
    seq_lens = [1, 280, 65]
    rows = make_rows(seq_lens, 1, 80, torch.float32, block_size)
    q = torch.randn(len(seq_lens), 7, 80, device=device)
    out = torch.empty_like(q)
    paged_decode_attention_triton(q, rows.k_cache, rows.v_cache, rows.block_tables, rows.seq_lens, 0.125, splits, out)
    assert_attention(out, rows.expected(q, [1] * len(seq_lens), 0.125))


@pytest.mark.parametrize("splits", [1, 2])
def test_kernel_gives_zero_for_a_padding_row(splits: int, make_rows: Callable, device: torch.device) -> None:
    rows = make_rows([0, 5], 1, 16, torch.float32)
    q = torch.randn(2, 2, 16, device=device)
    out = torch.empty_like(q)
    paged_decode_attention_triton(q, rows.k_cache, rows.v_cache, rows.block_tables, rows.seq_lens, 1.0, splits, out)
    assert not out[0].any()
    assert out[1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (64, 8, 128)])
@pytest.mark.parametrize("seq_lens", [[8000], [1, 4097, 333, 2048] * 2, list(range(1, 257))])
def test_large(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq_lens: list[int],
    make_rows: Callable,
    assert_attention: Callable,
) -> None:
    rows = make_rows(seq_lens, kv_heads, head_dim, dtype)
    q = torch.randn(len(seq_lens), heads, head_dim, device="cuda").to(dtype)
    scale = head_dim**-0.5
    out = paged_decode_attention(
        q, rows.k_cache, rows.v_cache, rows.block_tables, rows.seq_lens, scale, max(seq_lens) + 100
    )
    assert_attention(out, rows.expected(q, [1] * len(seq_lens), scale))
