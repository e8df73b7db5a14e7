"""A step of decoding rows and prompt rows together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.paged_attention import paged_attention


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [([40, 7], [1, 1]), ([40, 7], [33, 7]), ([40, 7, 30, 50], [1, 7, 1, 20]), ([9, 1], [1, 1])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_step(
    where: str,
    seq_lens: list[int],
    query_lens: list[int],
    dtype: torch.dtype,
    make_rows: Callable,
    assert_attention: Callable,
) -> None:
    device = torch.device(where)
    rows = make_rows(seq_lens, 3, 64, dtype, where=device)
    query_start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    q = torch.randn(int(query_start[-1]), 9, 64, device=device).to(dtype)
    # The projection holds the keys and values of this step's tokens; what the cache has of them is to be overwritten.
    positions, slots, newest = [], [], []
    for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            positions.append(position)
            slots.append(int(rows.block_tables[row, position // 16]) * 16 + position % 16)
            newest.append((rows.keys[row][position], rows.values[row][position]))
    caches = [rows.k_cache.clone(), rows.v_cache.clone()]
    for cache in caches:
        cache.view(-1, 3, 64)[slots] = float("nan")
    keys, values = (torch.stack(tokens).to(device) for tokens in zip(*newest, strict=True))
    no_turn = torch.cat((torch.ones(64, 32), torch.zeros(64, 32)), dim=1).to(device)
    out = paged_attention(
        torch.cat((q, keys, values), dim=1).flatten(1),
        None,
        None,
        1e-6,
        torch.tensor(positions, dtype=torch.int32, device=device),
        no_turn,
        *caches,
        torch.tensor(slots, device=device),
        block_tables=rows.block_tables,
        row_slots=torch.arange(len(seq_lens), dtype=torch.int32, device=device),
        seq_lens=rows.seq_lens,
        query_start=query_start.to(device),
        scale=0.125,
        has_prefills=max(query_lens) > 1,
    )
    assert_attention(out, rows.expected(q, query_lens, 0.125))
    for cache, full in zip(caches, (rows.k_cache, rows.v_cache), strict=True):
        assert torch.equal(cache.nan_to_num(), full.nan_to_num())
