"""RMS norm: transformers as the oracle of the references, the references as that of the kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from paceline.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_transformers(dtype: torch.dtype) -> None:
    oracle = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    oracle.weight.data = torch.randn(96).to(dtype)
    x, residual = torch.randn(5, 96).to(dtype), torch.randn(5, 96).to(dtype)
    assert torch.equal(rms_norm(x, oracle.weight, 1e-5), oracle(x))
    normed, total = add_rms_norm(x, residual, oracle.weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, oracle(x + residual))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 100, 576, 2048])
def test_kernel_equals_reference(
    dtype: torch.dtype, size: int, device: torch.device, assert_rounded: Callable[..., None]
) -> None:
    x, weight = torch.randn(7, size, device=device).to(dtype), torch.randn(size, device=device).to(dtype)
    assert_rounded(rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [100, 576])
def test_add_kernel_equals_reference(
    dtype: torch.dtype, size: int, device: torch.device, assert_rounded: Callable[..., None]
) -> None:
    x, residual = torch.randn(2, 7, size, device=device).to(dtype).unbind(0)
    weight = torch.randn(size, device=device).to(dtype)
    normed, total = add_rms_norm_triton(x, residual, weight, 1e-5)
    _, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert_rounded(total, expected_total)
    # The norm is that of the rounded sum, however the sum was rounded.
    assert_rounded(normed, rms_norm_reference(total, weight, 1e-5), roundings=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [4096, 8192])
def test_large(dtype: torch.dtype, size: int, assert_rounded: Callable[..., None]) -> None:
    x, residual = torch.randn(2, 999, size, device="cuda").to(dtype).unbind(0)
    weight = torch.randn(size, device="cuda").to(dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_rounded(normed, rms_norm_reference(total, weight, 1e-5), roundings=2)
    assert_rounded(rms_norm(total, weight, 1e-5), normed)
