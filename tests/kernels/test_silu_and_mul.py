"""silu(gate) * up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference, silu_and_mul_triton


def test_gate_is_the_first_half() -> None:
    gate_up = torch.tensor([[0.0, 2.0, 5.0, 3.0]])
    sigmoid_of_2 = 0.8807970779778823
    torch.testing.assert_close(silu_and_mul(gate_up), torch.tensor([[0.0, 2 * sigmoid_of_2 * 3]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [48, 1100])
def test_kernel_equals_reference(
    dtype: torch.dtype, size: int, device: torch.device, assert_rounded: Callable[..., None]
) -> None:
    gate_up = torch.randn(3, 2 * size, device=device).to(dtype) * 4
    assert_rounded(silu_and_mul_triton(gate_up), silu_and_mul_reference(gate_up), roundings=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large(dtype: torch.dtype, assert_rounded: Callable[..., None]) -> None:
    gate_up = torch.randn(2048, 2 * 14336, device="cuda").to(dtype)
    assert_rounded(silu_and_mul(gate_up), silu_and_mul_reference(gate_up), roundings=2)
