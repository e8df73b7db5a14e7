"""Products of tens to hundreds of rows, tile by tile, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from paceline.kernels.linear import linear, norm_gated_linear
from paceline.kernels.tiled_linear import MAX_BUCKET, Tile, bucket_of, candidate_tiles, tiled_linear


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    product = x.double() @ weight.double().T
    if bias is not None:
        product += bias.double()
    if not gated:
        return product
    gate, up = product.chunk(2, dim=-1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("extras", ["", "bias", "gated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "size"), [(1, 16, 64), (16, 40, 576), (21, 33, 1000), (64, 96, 256)]
)
def test_kernel(
    num_rows: int, num_columns: int, size: int, dtype: torch.dtype, extras: str, device: torch.device
) -> None:
    """Whole tiles and parts of them, one step of the inner dimension and several."""
    gated = extras == "gated"
    x = torch.randn(num_rows, size).to(dtype)
    weight = (torch.randn(num_columns * (2 if gated else 1), size) * size**-0.5).to(dtype)
    bias = torch.randn(num_columns).to(dtype) if extras == "bias" else None
    out = tiled_linear(
        x.to(device),
        weight.to(device),
        Tile(rows=16, columns=16, inner=128, stages=3, warps=4),
        bias=None if bias is None else bias.to(device),
        gated=gated,
    )
    assert out.shape == (num_rows, num_columns)
    assert out.dtype == dtype
    # The interpreter truncates to bfloat16 instead of rounding.
    eps = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double().cpu(), exact(x, weight, bias, gated), rtol=eps, atol=eps)


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 16), (16, 16), (17, 32), (100, 128), (256, 256), (257, 512)])
def test_buckets(num_rows: int, bucket: int) -> None:
    assert bucket_of(num_rows) == bucket
    if bucket <= MAX_BUCKET:
        assert candidate_tiles(bucket)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [9, 16, 33, 64, 100, 128, 200, 256])
@pytest.mark.parametrize(("num_columns", "size"), [(4096, 1024), (1024, 3072), (1536, 576)])
def test_every_candidate(num_rows: int, num_columns: int, size: int, gated: bool) -> None:
    x = torch.randn(num_rows, size, device="cuda").to(torch.bfloat16)
    weight = (torch.randn(num_columns * (1 + gated), size, device="cuda") * size**-0.5).to(torch.bfloat16)
    for tile in candidate_tiles(bucket_of(num_rows)):
        out = tiled_linear(x, weight, tile, gated=gated)
        torch.testing.assert_close(out.double(), exact(x, weight, None, gated), rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
def test_the_tile_of_the_rows_bucket_is_taken() -> None:
    x = torch.randn(33, 256, device="cuda").to(torch.bfloat16)
    weight, norm_weight = torch.randn(128, 256, device="cuda").to(torch.bfloat16), torch.ones_like(x[0])
    tile = candidate_tiles(64)[0]
    assert torch.equal(linear(x, weight, tiles={64: tile}), tiled_linear(x, weight, tile))
    assert torch.equal(linear(x, weight, tiles={32: tile}), functional.linear(x, weight))
    gated, _ = norm_gated_linear(x, None, norm_weight, 1e-6, weight, tiles={64: tile})
    plain, _ = norm_gated_linear(x, None, norm_weight, 1e-6, weight)
    torch.testing.assert_close(gated, plain, rtol=2**-6, atol=2**-6)
