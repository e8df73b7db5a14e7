"""Decode attention over poisoned caches, against float64 attention a query at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels import decode_work
from paceline.kernels.decode_work import plan_decode
from paceline.kernels.paged_decode_attention import paged_decode_attention_reference, paged_decode_attention_triton
from paceline.kernels.rotary_and_store import rotary_and_store_reference
from tests.kernels.conftest import PagedRows

SHAPES = [(9, 3, 64), (14, 2, 64), (4, 2, 128), (8, 2, 80), (2, 2, 16), (5, 1, 96), (1, 1, 256)]


@pytest.fixture
def decode() -> Callable[..., torch.Tensor]:
    """Run the reference or the kernel for queries of rows in the order of their slots.

    The kernel is given them as part of a projection, with each row's newest key and value, which it has to find there:
    they are taken out of the cache. Positions turn nothing.
    """

    def run(which: str, q: torch.Tensor, rows: PagedRows, scale: float) -> torch.Tensor:
        num_rows = rows.seq_lens.shape[0]
        ids = torch.arange(num_rows + 1, dtype=torch.int32, device=q.device)
        out = torch.full_like(q, float("nan"))
        tables = (rows.block_tables, ids[:-1], ids, rows.seq_lens, scale, out)
        if which == "reference":
            paged_decode_attention_reference(q, rows.k_cache, rows.v_cache, *tables)
            return out
        qkv = torch.cat((q, rows.take_newest(rows.k_cache), rows.take_newest(rows.v_cache)), dim=1).flatten(1)
        work = plan_decode(ids, rows.seq_lens, rows.k_cache.shape[2])
        table = no_turn(int(rows.seq_lens.max()), q.shape[2]).to(q.device)
        paged_decode_attention_triton(qkv, None, None, 0.0, table, rows.k_cache, rows.v_cache, *tables, work)
        return out

    return run


def no_turn(positions: int, head_dim: int) -> torch.Tensor:
    """A table of cosines and sines of angle 0."""
    half = torch.ones(positions, head_dim // 2)
    return torch.cat((half, 0 * half), dim=1)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    make_rows: Callable,
    decode: Callable,
    assert_attention: Callable,
) -> None:
    for seq_lens in ([1], [33, 33], [1, 16, 100, 65, 17]):
        rows = make_rows(seq_lens, kv_heads, head_dim, dtype, where=torch.device("cpu"))
        q = torch.randn(len(seq_lens), heads, head_dim).to(dtype)
        out = decode("reference", q, rows, 0.125)
        assert_attention(out, rows.expected(q, [1] * len(seq_lens), 0.125))


def test_reference_with_more_rows_than_it_gathers_at_once(
    make_rows: Callable, decode: Callable, assert_attention: Callable
) -> None:
    seq_lens = [2000, 3000, 2500, 1]
    rows = make_rows(seq_lens, 2, 128, torch.float32, where=torch.device("cpu"))
    q = torch.randn(4, 2, 128)
    assert_attention(decode("reference", q, rows, 0.1), rows.expected(q, [1] * 4, 0.1))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    make_rows: Callable,
    decode: Callable,
    assert_attention: Callable,
    device: torch.device,
) -> None:
    seq_lens = [1, 64, 100]
    rows = make_rows(seq_lens, kv_heads, head_dim, dtype)
    q = torch.randn(len(seq_lens), heads, head_dim, device=device).to(dtype)
    out = decode("kernel", q, rows, 0.125)
    assert_attention(out, rows.expected(q, [1] * len(seq_lens), 0.125))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (80, 80), (64, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_norms_turns_and_stores_as_the_references_do(
    norm: bool, head_dim: int, rotated: int, dtype: torch.dtype, make_rows: Callable, device: torch.device
) -> None:
    heads, kv_heads, seq_lens = 6, 2, [1, 17, 130]
    rows = make_rows(seq_lens, kv_heads, head_dim, dtype, where=torch.device("cpu"))
    for cache in (rows.k_cache, rows.v_cache):
        rows.take_newest(cache)
    qkv = torch.randn(len(seq_lens), (heads + 2 * kv_heads) * head_dim).to(dtype)
    weights = [(torch.rand(head_dim) + 0.5).to(dtype) for _ in range(2)] if norm else [None, None]
    angles = torch.rand(131, rotated // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    ids = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
    positions = rows.seq_lens - 1
    block_ids = rows.block_tables.gather(1, (positions // 16).long()[:, None])[:, 0].long()
    slot_mapping = block_ids * 16 + positions % 16

    k_cache, v_cache = rows.k_cache.to(device, copy=True), rows.v_cache.to(device, copy=True)
    expected = torch.empty(len(seq_lens), heads, head_dim, dtype=dtype)
    query = rotary_and_store_reference(
        qkv, *weights, 1e-6, positions, cos_sin, rows.k_cache, rows.v_cache, slot_mapping
    )
    tables = (rows.block_tables, ids[:-1], ids, rows.seq_lens)
    paged_decode_attention_reference(query, rows.k_cache, rows.v_cache, *tables, 0.2, expected)

    on_device = [None if weight is None else weight.to(device) for weight in weights]
    tables = tuple(table.to(device) for table in tables)
    out = torch.empty_like(expected, device=device)
    work = plan_decode(tables[2], tables[3], kv_heads)
    inputs = qkv.to(device), *on_device, 1e-6, cos_sin.to(device)
    paged_decode_attention_triton(*inputs, k_cache, v_cache, *tables, 0.2, out, work)
    tolerance = 8 * torch.finfo(dtype).eps  # several roundings, the interpreter's by truncation
    for actual, wanted in ((out, expected), (k_cache, rows.k_cache)):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(v_cache.cpu(), rows.v_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (6, 3)])
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_kernel_with_rows_of_several_chunks(
    heads: int,
    kv_heads: int,
    block_size: int,
    make_rows: Callable,
    decode: Callable,
    assert_attention: Callable,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With chunks this short a row has up to twelve, more than are combined at once."""
    monkeypatch.setattr(decode_work, "MIN_CHUNK", 64)
    monkeypatch.setattr(decode_work, "PROGRAMS_PER_PROCESSOR", 16)
    seq_lens = [1, 700, 65, 128]
    rows = make_rows(seq_lens, kv_heads, 80, torch.float32, block_size)
    q = torch.randn(len(seq_lens), heads, 80, device=device)
    for _ in range(2):  # the second time with what the first left in memory
        out = decode("kernel", q, rows, 0.125)
        assert_attention(out, rows.expected(q, [1] * len(seq_lens), 0.125))


@pytest.mark.parametrize("which", ["reference", "kernel"])
def test_rows_of_no_and_of_several_tokens_are_left_alone(
    which: str, make_rows: Callable, assert_attention: Callable, device: torch.device
) -> None:
    """Also, a row's table is that of its slot, whatever its place among the rows."""
    where = device if which == "kernel" else torch.device("cpu")
    rows = make_rows([200, 40, 7], 1, 16, torch.float32, where=where)
    q = torch.randn(5, 2, 16, device=where)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=where)

    out = torch.full_like(q, float("nan"))
    # Slot 2 with one token, slot 0 with two, slot 1 with one, and a padding row; the last token is nobody's.
    query_start, seq_lens = ints(0, 1, 3, 4, 4), ints(7, 200, 40, 0)
    tables = (rows.block_tables, ints(2, 0, 1, -1), query_start, seq_lens, 0.25, out)
    if which == "kernel":
        newest = [torch.zeros(5, 1, 16, device=where) for _ in range(2)]
        for tokens, cache in zip(newest, (rows.k_cache, rows.v_cache), strict=True):
            tokens[[0, 3]] = rows.take_newest(cache)[[2, 1]]
        qkv = torch.cat((q, *newest), dim=1).flatten(1)
        caches = rows.k_cache, rows.v_cache
        work = plan_decode(query_start, seq_lens, 1)
        paged_decode_attention_triton(qkv, None, None, 0.0, no_turn(200, 16).to(where), *caches, *tables, work)
    else:
        paged_decode_attention_reference(q, rows.k_cache, rows.v_cache, *tables)
    assert out[[1, 2, 4]].isnan().all()
    by_slot = rows.expected(q[[1, 3, 0]], [1, 1, 1], 0.25)
    assert_attention(out[[0, 3]], by_slot[[2, 1]])


def test_chunks_cover_every_row_once_and_are_about_equal(device: torch.device) -> None:
    seq_lens = [1, 5000, 130, 0, 128, 2048]
    query_lens = [1, 1, 1, 0, 2, 1]
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32)
    work = plan_decode(starts, torch.tensor(seq_lens, dtype=torch.int32, device=device), 2)
    length = int(work.chunk_len)
    assert length % decode_work.BLOCK_N == 0
    pieces = [(row, chunk) for row, chunk in zip(work.rows.tolist(), work.chunks.tolist(), strict=True) if row >= 0]
    expected = [
        (row, chunk)
        for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True))
        if query_len == 1
        for chunk in range(max(1, -(-(seq_len - 1) // length)))
    ]
    assert pieces == expected
    assert not work.arrivals.any()


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
    decode: Callable,
    assert_attention: Callable,
) -> None:
    rows = make_rows(seq_lens, kv_heads, head_dim, dtype)
    q = torch.randn(len(seq_lens), heads, head_dim, device="cuda").to(dtype)
    scale = head_dim**-0.5
    assert_attention(decode("kernel", q, rows, scale), rows.expected(q, [1] * len(seq_lens), scale))
