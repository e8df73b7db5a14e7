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
    q = torch.randn(sum(query_lens), 9, 64, device=device).to(dtype)
    out = paged_attention(
        q,
        rows.k_cache,
        rows.v_cache,
        block_tables=rows.block_tables,
        row_slots=torch.arange(len(seq_lens), dtype=torch.int32, device=device),
        seq_lens=rows.seq_lens,
        query_start=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device),
        scale=0.125,
        has_prefills=max(query_lens) > 1,
        has_decodes=1 in query_lens,
    )
    assert_attention(out, rows.expected(q, query_lens, 0.125))
