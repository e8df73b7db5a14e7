"""Prefill attention over poisoned caches, whole prompts and chunks, against float64 attention a query at a time."""

from __future__ import annotations

import random
from collections.abc import Callable

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
    attend(
        q, rows.k_cache, rows.v_cache, table, torch.cat((row_slots, padding)), query_start,
        torch.cat((rows.seq_lens, torch.zeros_like(padding))), 0.125, out,
    )  # fmt: skip
    several = torch.cat([torch.full((length,), length > 1) for length in query_lens]).to(device)
    assert (out[:tokens][~several] == UNTOUCHED).all()
    assert (out[tokens:] == UNTOUCHED).all()
    expected = rows.expected(q[:tokens], query_lens, 0.125)
    assert_attention(out[:tokens][several], expected[several.cpu()])


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


@pytest.fixture
def hopper() -> torch.device:
    """A GPU that has what the kernel for Hopper uses."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 2, 128), (5, 5, 128), (8, 1, 64)])
@pytest.mark.parametrize("block_size", [16, 32, 64])
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
@pytest.mark.parametrize("seed", range(8))
def test_hopper_kernel_on_random_rows(
    seed: int, make_rows: Callable, assert_attention: Callable, hopper: torch.device
) -> None:
    choose = random.Random(seed)
    seq_lens = [choose.randint(1, choose.choice([20, 300, 1000])) for _ in range(choose.choice([1, 7, 40]))]
    query_lens = [choose.randint(1, length) for length in seq_lens]
    kv_heads, head_dim = choose.choice([1, 2, 3]), choose.choice([64, 128])
    check(
        paged_prefill_attention_hopper, kv_heads * choose.randint(1, 7), kv_heads, head_dim, torch.bfloat16,
        seq_lens, query_lens, hopper, make_rows, assert_attention, choose.choice([16, 32, 64]),
    )  # fmt: skip


@pytest.mark.gpu
def test_hopper_kernel_finds_its_row_among_more_than_it_looks_at_at_once(
    make_rows: Callable, assert_attention: Callable, hopper: torch.device
) -> None:
    query_lens = [1] * 600
    query_lens[3], query_lens[255], query_lens[256], query_lens[599] = 2, 17, 3, 200
    check(
        paged_prefill_attention_hopper, 2, 1, 64, torch.bfloat16, query_lens, query_lens,
        hopper, make_rows, assert_attention,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [paged_prefill_attention, paged_prefill_attention_triton])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (16, 8, 128)])
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
    device, scale = torch.device("cuda"), head_dim**-0.5
    rows = make_rows(seq_lens, kv_heads, head_dim, dtype)
    table, row_slots = in_slots(rows.block_tables, list(range(len(seq_lens))))
    metadata = (table, row_slots, starts(query_lens, device), rows.seq_lens, scale)
    q = torch.randn(sum(query_lens), heads, head_dim, device=device).to(dtype)
    out = torch.zeros_like(q)
    kernel(q, rows.k_cache, rows.v_cache, *metadata, out)
    expected = torch.zeros(q.shape, dtype=torch.float32, device=device)
    exact = [cache.float() for cache in (q, rows.k_cache, rows.v_cache)]
    paged_prefill_attention_reference(*exact, *metadata, expected)
    assert_attention(out, expected.double().cpu())
