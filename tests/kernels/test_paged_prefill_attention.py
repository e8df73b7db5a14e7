"""Prefill attention over poisoned caches, whole prompts and chunks, against float64 attention a query at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.paged_prefill_attention import (
    paged_prefill_attention,
    paged_prefill_attention_reference,
    paged_prefill_attention_triton,
)

SHAPES = [(9, 3, 64), (14, 2, 64), (4, 2, 128), (8, 2, 80), (2, 2, 16), (5, 1, 96), (1, 1, 256)]


def starts(query_lens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, make_rows: Callable, assert_attention: Callable
) -> None:
    cpu = torch.device("cpu")
    seq_lens, query_lens = [20, 1, 70, 33], [20, 1, 9, 32]
    rows = make_rows(seq_lens, kv_heads, head_dim, dtype, where=cpu)
    q = torch.randn(sum(query_lens), heads, head_dim).to(dtype)
    out = torch.empty_like(q)
    paged_prefill_attention_reference(
        q, rows.k_cache, rows.v_cache, rows.block_tables, rows.seq_lens, starts(query_lens, cpu), 0.125, out
    )
    assert_attention(out, rows.expected(q, query_lens, 0.125))


@pytest.mark.parametrize(("seq_len", "query_len"), [(1100, 1100), (1500, 1200)])
def test_reference_with_more_queries_than_it_takes_at_once(
    seq_len: int, query_len: int, make_rows: Callable, assert_attention: Callable
) -> None:
    cpu = torch.device("cpu")
    rows = make_rows([seq_len], 1, 16, torch.float32, where=cpu)
    q = torch.randn(query_len, 1, 16)
    out = paged_prefill_attention(
        q, rows.k_cache, rows.v_cache, rows.block_tables, rows.seq_lens, starts([query_len], cpu), query_len, 0.25
    )
    assert_attention(out, rows.expected(q, [query_len], 0.25))


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
    seq_lens, query_lens = [20, 1, 80], [20, 1, 9]
    rows = make_rows(seq_lens, kv_heads, head_dim, dtype)
    q = torch.randn(sum(query_lens), heads, head_dim, device=device).to(dtype)
    out = torch.empty_like(q)
    paged_prefill_attention_triton(
        q, rows.k_cache, rows.v_cache, rows.block_tables, rows.seq_lens, starts(query_lens, device), 20, 0.125, out
    )
    assert_attention(out, rows.expected(q, query_lens, 0.125))


@pytest.mark.parametrize("block_size", [1, 8, 128])
@pytest.mark.parametrize("chunks", [[90], [1, 70, 19]])
def test_kernel_on_chunks_of_a_prompt(
    block_size: int, chunks: list[int], make_rows: Callable, assert_attention: Callable, device: torch.device
) -> None:
    rows = make_rows([90], 1, 32, torch.float32, block_size)
    q = torch.randn(90, 3, 32, device=device)
    parts, done = [], 0
    for chunk in chunks:
        part = torch.empty(chunk, 3, 32, device=device)
        done += chunk
        seq_lens = torch.tensor([done], dtype=torch.int32, device=device)
        paged_prefill_attention_triton(
            q[done - chunk : done].contiguous(),
            rows.k_cache,
            rows.v_cache,
            rows.block_tables,
            seq_lens,
            starts([chunk], device),
            chunk,
            0.2,
            part,
        )
        parts.append(part)
    assert_attention(torch.cat(parts), rows.expected(q, [90], 0.2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128)])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"), [([2048], [2048]), ([5000, 300, 77], [500, 300, 1]), ([129] * 20, [128] * 20)]
)
def test_large(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq_lens: list[int],
    query_lens: list[int],
    make_rows: Callable,
    assert_attention: Callable,
) -> None:
    device, scale = torch.device("cuda"), head_dim**-0.5
    rows = make_rows(seq_lens, kv_heads, head_dim, dtype)
    q = torch.randn(sum(query_lens), heads, head_dim, device=device).to(dtype)
    out = paged_prefill_attention(
        q,
        rows.k_cache,
        rows.v_cache,
        rows.block_tables,
        rows.seq_lens,
        starts(query_lens, device),
        max(query_lens),
        scale,
    )
    expected = torch.empty(q.shape, dtype=torch.float32, device=device)
    exact = [cache.float() for cache in (q, rows.k_cache, rows.v_cache)]
    paged_prefill_attention_reference(
        *exact, rows.block_tables, rows.seq_lens, starts(query_lens, device), scale, expected
    )
    assert_attention(out, expected.double().cpu())
