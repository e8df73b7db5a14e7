"""Decode attention over poisoned caches, against attention in float64."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from paceline.kernels import decode_work
from paceline.kernels.decode_work import plan_decode
from paceline.kernels.paged_decode_attention import (
    paged_decode_attention,
    paged_decode_attention_reference,
    paged_decode_attention_triton,
)
from paceline.kernels.paged_decode_attention_hopper import paged_decode_attention_hopper

SHAPES = [(9, 3, 64), (14, 2, 64), (4, 2, 128), (8, 2, 80), (2, 2, 16), (5, 1, 96), (1, 1, 256)]


@pytest.fixture
def decode() -> Callable[..., torch.Tensor]:
    """Run the reference, the kernel, or what chooses between them, for rows in the order of their slots."""

    def run(which: str, q: torch.Tensor, rows: object, scale: float) -> torch.Tensor:
        num_rows = rows.seq_lens.shape[0]
        ids = torch.arange(num_rows + 1, dtype=torch.int32, device=q.device)
        out = torch.full_like(q, float("nan"))
        tensors = (q, rows.k_cache, rows.v_cache, rows.block_tables, ids[:-1], ids, rows.seq_lens, scale, out)
        if which == "reference":
            paged_decode_attention_reference(*tensors)
        elif which == "hopper":
            paged_decode_attention_hopper(*tensors, plan_decode(ids, rows.seq_lens, rows.k_cache.shape[2]))
        elif which == "kernel":
            paged_decode_attention_triton(*tensors, plan_decode(ids, rows.seq_lens, rows.k_cache.shape[2]))
        else:
            paged_decode_attention(*tensors)
        return out

    return run


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
    assert_attention(decode("", q, rows, 0.1), rows.expected(q, [1] * 4, 0.1))


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
    tensors = (q, rows.k_cache, rows.v_cache, rows.block_tables, ints(2, 0, 1, -1), query_start, seq_lens, 0.25, out)
    if which == "kernel":
        paged_decode_attention_triton(*tensors, plan_decode(query_start, seq_lens, 1))
    else:
        paged_decode_attention_reference(*tensors)
    assert out[[1, 2, 4]].isnan().all()
    by_slot = rows.expected(q[[1, 3, 0]], [1, 1, 1], 0.25)
    assert_attention(out[[0, 3]], by_slot[[2, 1]])


@pytest.mark.parametrize("seq_lens", [[1, 5000, 130, 0, 128, 2048, 130], [700] * 3, [900, 70] * 40])
def test_chunks_cover_every_row_once_and_the_longest_come_first(seq_lens: list[int], device: torch.device) -> None:
    several = 4  # a row of two query tokens
    query_lens = [0 if length == 0 else 2 if row == several else 1 for row, length in enumerate(seq_lens)]
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32)
    work = plan_decode(starts, torch.tensor(seq_lens, dtype=torch.int32, device=device), 2)
    chunk_len = int(work.chunk_len)
    assert chunk_len % decode_work.BLOCK_N == 0
    expected, firsts = {}, {}
    for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        firsts[row] = len(expected)
        if query_len == 1:
            expected |= {
                (row, chunk): min(chunk_len, seq_len - chunk * chunk_len) for chunk in range(-(-seq_len // chunk_len))
            }
    rows, chunks = work.rows.tolist(), work.chunks.tolist()
    pieces = [(row, chunk) for row, chunk in zip(rows, chunks, strict=True) if row >= 0]
    assert rows[len(pieces) :] == [-1] * (len(rows) - len(pieces))
    assert sorted(pieces) == sorted(expected)
    lengths = [expected[piece] for piece in pieces]
    assert lengths == sorted(lengths, reverse=True)
    assert work.firsts.tolist()[: len(pieces)] == [firsts[row] for row, _ in pieces]
    assert not work.arrivals.any()


def test_rows_of_about_the_same_length_stay_whole(device: torch.device) -> None:
    """A program's share would be shorter than the longest, but it is not worth putting results together."""
    programs = decode_work.PROGRAMS_PER_PROCESSOR * decode_work.num_processors(device)
    lengths = [1000 + 200 * row // programs for row in range(programs)]
    work = plan_decode(
        torch.arange(programs + 1, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        1,
    )
    assert int(work.chunk_len) >= max(lengths)


# Kernels for Hopper take seconds to compile: these are few.
HOPPER_SHAPES = [
    (torch.bfloat16, 9, 3, 64, 16),
    (torch.bfloat16, 32, 8, 128, 16),
    (torch.float16, 16, 8, 128, 32),
    (torch.bfloat16, 5, 5, 128, 64),
    (torch.bfloat16, 16, 1, 128, 16),
]
"""Dtype, query heads, KV heads, head size, block size."""


@pytest.mark.usefixtures("hopper")
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "block_size"), HOPPER_SHAPES)
def test_hopper_kernel_on_random_rows(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    make_rows: Callable,
    decode: Callable,
    assert_attention: Callable,
) -> None:
    """Rows of every remainder of a run and a tile, alone and many, one chunk and many."""
    choose = random.Random(0)
    lens = [[1], [2, 16, 17, 63, 64, 65, 80], [8000], list(range(1, 200)), [choose.randint(1, 3000) for _ in range(70)]]
    for seq_lens in lens:
        rows = make_rows(seq_lens, kv_heads, head_dim, dtype, block_size)
        q = torch.randn(len(seq_lens), heads, head_dim, device="cuda").to(dtype)
        for _ in range(2):  # the second time with what the first left in memory
            assert_attention(decode("hopper", q, rows, 0.1), rows.expected(q, [1] * len(seq_lens), 0.1))


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
    assert_attention(decode("", q, rows, scale), rows.expected(q, [1] * len(seq_lens), scale))
