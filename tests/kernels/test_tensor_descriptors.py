"""Descriptors for the tensor memory accelerator: one for a place in memory, whoever it belongs to."""

from __future__ import annotations

import weakref

import torch

from paceline.kernels.tensor_descriptors import TensorDescriptor, describe

MEMORY = torch.zeros(4, 16, 64, dtype=torch.bfloat16)


def described(tensor: torch.Tensor, rows: int = 64, block: int = 16) -> TensorDescriptor:
    return describe(tensor, (rows, 64), (64, 1), (block, 64))


def test_it_says_what_triton_asks() -> None:
    descriptor = described(MEMORY[1], rows=16)
    assert descriptor.base.data_ptr() == MEMORY.data_ptr() + 16 * 64 * 2
    assert descriptor.base.dtype == torch.bfloat16
    assert (descriptor.shape, descriptor.strides, descriptor.block_shape) == ([16, 64], [64, 1], [16, 64])
    assert (descriptor.layout.swizzle_byte_width, descriptor.layout.element_bitwidth) == (128, 16)


def test_there_is_one_for_the_same_memory() -> None:
    same = described(MEMORY)
    with torch.inference_mode():
        assert described(MEMORY.view(64, 64)) is same
    for other in (
        described(MEMORY[1]),
        described(MEMORY.view(torch.float16)),
        described(MEMORY, rows=32),
        described(MEMORY, block=32),
    ):
        assert other is not same


def test_it_keeps_no_memory() -> None:
    tensor = MEMORY.clone()
    descriptor, alive = described(tensor), weakref.ref(tensor)
    address = tensor.data_ptr()
    del tensor
    assert alive() is None
    assert descriptor.base.data_ptr() == address
