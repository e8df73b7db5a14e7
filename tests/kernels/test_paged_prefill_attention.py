"""Prefill attention over poisoned caches, whole prompts and chunks, against attention in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch

from paceline.kernels.paged_prefill_attention import paged_prefill_attention, paged_prefill_attention_reference
from paceline.kernels.paged_prefill_attention_hopper import paged_prefill_attention_hopper
from paceline.kernels.paged_prefill_attention_triton import Tile, paged_prefill_attention_triton

SHAPES = [(9, 3, 64), (14, 2, 64), (4, 2, 128), (8, 2, 80), (2, 2, 16), (5, 1, 96), (1, 1, 256)]
UNTOUCHED = 77.0


def starts(query_lens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device)


def in_slots(block_tables: torch.Tensor, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' block tables put into the named slots of a larger table of invalid ids, and the rows' slots."""
    table = torch.full((max(slots) + 2, block_tables.shape[1]), 2**30, dtype=torch.int32, device=block_tables.device)
    rows = torch.tensor(slots, dtype=torch.int32, device=block_tables.device)
    table[rows.long()] = block_tables
    return table, rows


def check(
    attend: Callable[..., None],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    seq_lens: list[int],
    query_lens: list[int],
    device: torch.device,
    make_rows: Callable,
    assert_attention: Callable,
    block_size: int = 16,
) -> None:
    """Rows of at least two tokens get exact attention, out of scattered slots; all other memory stays as it was."""
    rows = make_rows(seq_lens, kv_heads, head_dim, dtype, block_size, where=device)
    table, row_slots = in_slots(rows.block_tables, [(3 * row + 1) % 2003 for row in range(len(seq_lens))])
    # Two rows of padding, and three tokens that belong to no row.
    padding = torch.full((2,), -1, dtype=torch.int32, device=device)
    query_start = starts([*query_lens, 0, 0], device)
    tokens = sum(query_lens)
    q = torch.randn(tokens + 3, heads, head_dim, device=device).to(dtype)
    out = torch.full_like(q, UNTOUCHED)
    row_slots = torch.cat((row_slots, padding))
    metadata = (table, row_slots, query_start, torch.cat((rows.seq_lens, torch.zeros_like(padding))), 0.125)
    attend(q, rows.k_cache, rows.v_cache, *metadata, out)
    several = torch.cat([torch.full((length,), length > 1) for length in query_lens])
    out, untouched = out[:tokens].cpu(), out[tokens:]
    assert (untouched == UNTOUCHED).all()
    assert (out[~several] == UNTOUCHED).all()
    assert_attention(out[several], rows.expected(q[:tokens], query_lens, 0.125)[several])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, make_rows: Callable, assert_attention: Callable
) -> None:
    check(
        paged_prefill_attention_reference, heads, kv_heads, head_dim, dtype, [20, 7, 70, 33], [20, 1, 9, 32],
        torch.device("cpu"), make_rows, assert_attention,
    )  # fmt: skip


@pytest.mark.parametrize(("seq_len", "query_len"), [(1100, 1100), (1500, 1200)])
def test_reference_with_more_queries_than_it_takes_at_once(
    seq_len: int, query_len: int, make_rows: Callable, assert_attention: Callable
) -> None:
    check(
        paged_prefill_attention, 1, 1, 16, torch.float32, [seq_len], [query_len],
        torch.device("cpu"), make_rows, assert_attention,
    )  # fmt: skip


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
    check(
        paged_prefill_attention_triton, heads, kv_heads, head_dim, dtype, [20, 7, 80], [20, 1, 9],
        device, make_rows, assert_attention,
    )  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_size", [1, 8, 128])
@pytest.mark.parametrize("query_len", [2, 61, 90])
def test_kernel_in_several_tiles(
    overlap: bool,
    block_size: int,
    query_len: int,
    make_rows: Callable,
    assert_attention: Callable,
    device: torch.device,
) -> None:
    def attend(*arguments: torch.Tensor) -> None:
        paged_prefill_attention_triton(*arguments, tile=Tile(16, 16, 4, 2, overlap))

    check(
        attend, 3, 1, 32, torch.float32, [90], [query_len], device, make_rows, assert_attention, block_size
    )  # fmt: skip


def test_kernel_finds_its_row_among_more_than_it_looks_at_at_once(
    make_rows: Callable, assert_attention: Callable, device: torch.device
) -> None:
    def attend(*arguments: torch.Tensor) -> None:
        paged_prefill_attention_triton(*arguments, tile=Tile(16, 16, 4, 2, False))

    query_lens = [1] * 600
    query_lens[3], query_lens[255], query_lens[256], query_lens[599] = 2, 17, 3, 20
    check(attend, 1, 1, 16, torch.float32, query_lens, query_lens, device, make_rows, assert_attention)


# Kernels for Hopper take seconds to compile: these are few.
HOPPER_SHAPES = [
    (torch.bfloat16, 9, 3, 64, 16),
    (torch.bfloat16, 32, 8, 128, 16),
    (torch.float16, 16, 8, 128, 32),
    (torch.bfloat16, 5, 5, 128, 64),
]
"""Dtype, query heads, KV heads, head size, block size."""


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "block_size"), HOPPER_SHAPES)
def test_hopper_kernel(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    make_rows: Callable,
    assert_attention: Callable,
    hopper: torch.device,
) -> None:
    seq_lens, query_lens = [20, 7, 300, 2, 129, 512, 640, 385], [20, 1, 9, 2, 129, 130, 600, 257]
    check(
        paged_prefill_attention_hopper, heads, kv_heads, head_dim, dtype, seq_lens, query_lens,
        hopper, make_rows, assert_attention, block_size,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "block_size"), HOPPER_SHAPES)
@pytest.mark.parametrize("seed", range(6))
def test_hopper_kernel_on_random_rows(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    seed: int,
    make_rows: Callable,
    assert_attention: Callable,
    hopper: torch.device,
) -> None:
    choose = random.Random(seed)
    seq_lens = [choose.randint(1, choose.choice([20, 300, 2000])) for _ in range(choose.choice([1, 7, 40]))]
    query_lens = [choose.randint(1, length) for length in seq_lens]
    check(
        paged_prefill_attention_hopper, heads, kv_heads, head_dim, dtype, seq_lens, query_lens,
        hopper, make_rows, assert_attention, block_size,
    )  # fmt: skip


@pytest.mark.gpu
def test_hopper_kernel_finds_its_row_among_more_than_it_looks_at_at_once(
    make_rows: Callable, assert_attention: Callable, hopper: torch.device
) -> None:
    query_lens = [1] * 600
    query_lens[3], query_lens[255], query_lens[256], query_lens[599] = 2, 17, 3, 200
    check(
        paged_prefill_attention_hopper, 9, 3, 64, torch.bfloat16, query_lens, query_lens,
        hopper, make_rows, assert_attention,
    )  # fmt: skip


@pytest.mark.gpu
def test_hopper_kernels_share_a_counter(make_rows: Callable, assert_attention: Callable, hopper: torch.device) -> None:
    counter = torch.zeros(1, dtype=torch.int32, device=hopper)
    for query_lens in ([1] * 9, [2], [3000, 1, 500], [17] * 40, [129, 1]):
        check(
            partial(paged_prefill_attention_hopper, counter=counter), 9, 3, 64, torch.bfloat16, query_lens, query_lens,
            hopper, make_rows, assert_attention,
        )  # fmt: skip
        assert counter.item() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [paged_prefill_attention, paged_prefill_attention_triton])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim"),
    [(torch.bfloat16, 9, 3, 64), (torch.bfloat16, 32, 8, 128), (torch.float16, 16, 8, 128)],
)
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"), [([2048], [2048]), ([5000, 300, 77], [500, 300, 1]), ([129] * 20, [128] * 20)]
)
def test_large(
    kernel: Callable[..., None],
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq_lens: list[int],
    query_lens: list[int],
    make_rows: Callable,
    assert_attention: Callable,
) -> None:
    check(
        kernel, heads, kv_heads, head_dim, dtype, seq_lens, query_lens,
        torch.device("cuda"), make_rows, assert_attention,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [paged_prefill_attention, paged_prefill_attention_triton])
def test_a_captured_call_takes_the_rows_it_finds(
    kernel: Callable[..., None], make_rows: Callable, assert_attention: Callable
) -> None:
    device = torch.device("cuda")
    rows = make_rows([300, 200, 400], 3, 64, torch.bfloat16, where=device)
    q = torch.randn(512, 9, 64, dtype=torch.bfloat16, device=device)
    row_slots, query_start, seq_lens = (torch.zeros(size, dtype=torch.int32, device=device) for size in (4, 5, 4))
    metadata = (rows.block_tables, row_slots, query_start, seq_lens, 0.125)
    out = torch.empty_like(q)
    kernel(q, rows.k_cache, rows.v_cache, *metadata, out)  # Compiles the kernel, which a capture may not.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(q, rows.k_cache, rows.v_cache, *metadata, out)
    for slots, starts_of, lens in (
        ([0, 1, 2, -1], [0, 300, 301, 401, 401], [300, 200, 400, 0]),
        ([2, 0, -1, -1], [0, 112, 412, 412, 412], [400, 300, 0, 0]),
    ):
        for tensor, values in ((row_slots, slots), (query_start, starts_of), (seq_lens, lens)):
            tensor.copy_(torch.tensor(values, dtype=torch.int32))
        out.fill_(UNTOUCHED)
        graph.replay()
        expected = torch.full(q.shape, UNTOUCHED, dtype=torch.float64)
        for slot, (begin, end) in zip(slots, pairwise(starts_of), strict=True):
            if end - begin > 1:
                expected[begin:end] = rows.expected_of(slot, q[begin:end], 0.125)
        assert_attention(out, expected)
