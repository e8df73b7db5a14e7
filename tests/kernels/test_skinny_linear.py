"""Products of few rows, with what is computed along with them, against the operations one by one in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from paceline.kernels import skinny_linear as skinny
from paceline.kernels.linear import norm_gated_linear, norm_linear
from paceline.kernels.skinny_linear import MAX_ROWS, skinny_add_linear, skinny_linear

SHAPES = [(64, 16), (40, 576), (33, 1000), (96, 4500)]
"""(columns, inner size): whole tiles and parts of them, one inner block and several."""


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    values = x.double()
    if norm_weight is not None:
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6) * norm_weight.double()
    product = values @ weight.double().T
    if bias is not None:
        product += bias.double()
    if gated:
        gate, up = product.chunk(2, dim=-1)
        product = functional.silu(gate) * up
    return product


@pytest.mark.parametrize(("num_columns", "size"), SHAPES)
def test_a_row_added_to_its_residual(num_columns: int, size: int, device: torch.device) -> None:
    x, residual, norm_weight = (
        torch.randn(1, length).to(torch.bfloat16) for length in (size, num_columns, num_columns)
    )
    weight = (torch.randn(num_columns, size) * size**-0.5).to(torch.bfloat16)
    on_device = [tensor.to(device) for tensor in (x, weight, residual, norm_weight[0])]
    weighted, total, squares = skinny_add_linear(*on_device)
    expected = on_device[2] + skinny_linear(*on_device[:2])[0]
    torch.testing.assert_close(total, expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(weighted, total * on_device[3], rtol=2**-7, atol=0)
    torch.testing.assert_close(squares.sum(), total.float().square().sum())


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8])
@pytest.mark.parametrize(("num_columns", "size"), SHAPES)
@pytest.mark.parametrize("extras", ["", "bias", "norm", "norm residual", "norm residual gated", "norm residual bias"])
def test_kernel(
    num_rows: int, num_columns: int, size: int, extras: str, device: torch.device, assert_rounded: Callable[..., None]
) -> None:
    gated = "gated" in extras
    dtype = torch.bfloat16

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    x, weight = draw(num_rows, size), draw(num_columns * (2 if gated else 1), size) * size**-0.5
    bias = draw(num_columns) if "bias" in extras else None
    residual = draw(num_rows, size) if "residual" in extras else None
    norm_weight = 1 + draw(size) / 8 if "norm" in extras else None

    def on_device(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    out, total = skinny_linear(
        x.to(device),
        weight.to(device),
        bias=on_device(bias),
        residual=on_device(residual),
        norm_weight=on_device(norm_weight),
        eps=1e-6,
        gated=gated,
    )
    assert out.shape == (num_rows, num_columns)
    assert out.dtype == dtype
    assert_rounded(total, x if residual is None else x + residual)
    expected = exact(total.cpu(), weight, bias, norm_weight, gated)
    # Rows are rounded after the norm's weight, and the result is.
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2**-6, atol=2**-6)


def test_a_gpu_of_little_shared_memory_takes_shorter_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ada's do, of 99 KiB, for the gated product of a wide model."""
    launched = []
    monkeypatch.setattr(skinny, "launch", lambda *arguments, **options: launched.append(arguments))
    for kibibytes in (227, 99):
        monkeypatch.setattr(skinny, "shared_memory", lambda _, kibibytes=kibibytes: kibibytes << 10)
        skinny_linear(torch.empty(4, 4096), torch.empty(64, 4096), gated=True)
    names = skinny._skinny_kernel.arg_names
    slices = [dict(zip(names, arguments[2:], strict=True))["SLICE"] for arguments in launched]
    assert slices == [256, 128]


@pytest.mark.parametrize("gated", [True, False])
def test_the_operations_one_by_one_mean_the_same(gated: bool) -> None:
    x, residual, norm_weight = torch.randn(3, 40), torch.randn(3, 40), torch.rand(40)
    weight, bias = torch.randn(24, 40), torch.randn(24)
    operation = norm_gated_linear if gated else norm_linear
    out, total = operation(x, residual, norm_weight, 1e-6, weight, bias)
    expected = exact(x + residual, weight, bias, norm_weight, gated)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(total, x + residual)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", range(1, MAX_ROWS + 1))
@pytest.mark.parametrize(("num_columns", "size"), [(4096, 1024), (1024, 3072), (151936, 1024), (4096, 12288)])
def test_large(num_rows: int, num_columns: int, size: int) -> None:
    x = torch.randn(num_rows, size, device="cuda").to(torch.bfloat16)
    weight = (torch.randn(num_columns, size, device="cuda") * size**-0.5).to(torch.bfloat16)
    out, _ = skinny_linear(x, weight)
    torch.testing.assert_close(out.float(), x.float() @ weight.float().T, rtol=2**-7, atol=2**-7)
