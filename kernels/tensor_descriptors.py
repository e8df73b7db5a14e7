"""Descriptors of tensors for the tensor memory accelerator, made once for a place in memory and not in every launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

_KEPT = 8192
"""More than the weights, caches and graphs' inputs of a large model are described in."""


def describe(
    tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
) -> TensorDescriptor:
    """Describe the memory of a tensor of a 16-bit type, from its first element on, as blocks of a larger shape.

    Blocks lie in shared memory with a swizzle of 128 bytes. It does not keep the tensor alive, which the launch that it
    is for must.
    """
    return _describe(tensor.data_ptr(), tensor.dtype, tuple(shape), tuple(strides), tuple(block))


class _Place:
    """What Triton asks of a described tensor. All that a descriptor says follows from it, whoever the memory is of."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@functools.lru_cache(_KEPT)
def _describe(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
    return TensorDescriptor(_Place(address, dtype), list(shape), list(strides), list(block), layout)
