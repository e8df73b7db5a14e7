"""The product is the same whichever way it is computed."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.linear import FEW_ROWS, linear


@pytest.mark.parametrize("rows", [0, 1, 2, 7, FEW_ROWS, FEW_ROWS + 1, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_plain_product(rows: int, dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 48, generator=generator).to(dtype)
    weight = torch.randn(96, 48, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    out = linear(x, weight, bias)
    assert out.is_contiguous()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)
    assert torch.equal(x, torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows)).to(dtype))
