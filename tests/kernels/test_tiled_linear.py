"""Products of many rows with what follows them, on a Hopper GPU, against float64 and the operations one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from paceline.kernels.linear import norm_gated_linear, norm_heads_linear
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.rotary_and_store import HeadPlaces, rotary_and_store, rotary_and_store_reference
from paceline.kernels.tiled_linear import (
    MIN_ROWS,
    can_be_gated,
    heads_tiling,
    tiled_gated_linear,
    tiled_heads_linear,
)

NAN = float("nan")
BLOCK_SIZE = 16


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def places(num_rows: int, kv_heads: int, head_dim: int, *, norm: bool, dtype: torch.dtype) -> HeadPlaces:
    """Of tokens in any order, of which every seventh is not stored; nothing is in the caches."""
    num_blocks = num_rows // BLOCK_SIZE + 2
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device="cuda")[:num_rows]
    slots[::7] = -1
    angles = torch.arange(5000, device="cuda")[:, None] * 10000.0 ** (
        -torch.arange(0, head_dim, 2, device="cuda") / head_dim
    )
    caches = torch.full((2, num_blocks, BLOCK_SIZE, kv_heads, head_dim), NAN, dtype=dtype, device="cuda")
    return HeadPlaces(
        q_norm=normal(head_dim, dtype=dtype) if norm else None,
        k_norm=normal(head_dim, dtype=dtype) if norm else None,
        eps=1e-6,
        positions=torch.randint(0, 5000, (num_rows,), dtype=torch.int32, device="cuda"),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1),
        k_cache=caches[0],
        v_cache=caches[1],
        slot_mapping=slots,
    )


def with_empty_caches(heads: HeadPlaces) -> HeadPlaces:
    return replace(heads, k_cache=torch.full_like(heads.k_cache, NAN), v_cache=torch.full_like(heads.v_cache, NAN))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [328, 1024, 4000])
@pytest.mark.parametrize("num_columns", [32, 544, 3072])
def test_gated(num_columns: int, size: int, dtype: torch.dtype, hopper: torch.device) -> None:
    """Rows, columns and steps that fill no tile; fewer tiles than processors, and several for each."""
    weight = normal(2 * num_columns, size, scale=size**-0.5, dtype=dtype)
    for num_rows in (1, 129, 1000, 5000):
        x = normal(num_rows, size, dtype=dtype)
        gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
        out = tiled_gated_linear(x, weight)
        assert out.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), functional.silu(gate) * up, rtol=eps, atol=eps)


@pytest.mark.gpu
def test_the_activation_of_large_sums(hopper: torch.device) -> None:
    """No overflow on the way: silu of -1000 is zero, and of 1000 is 1000."""
    weight = torch.ones(64, 512, dtype=torch.bfloat16, device=hopper)
    x = torch.full((200, 512), 2.0, dtype=torch.bfloat16, device=hopper)
    x[100:] = -2.0
    out = tiled_gated_linear(x, weight)
    assert (out[:100] == 1024.0 * 1024.0).all()
    assert (out[100:] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extras", ["", "bias", "norm"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "columns"),
    [(16, 8, 128, 256), (3, 1, 128, 128), (14, 2, 64, 128), (8, 4, 64, 256)],
)
def test_heads(
    heads: int, kv_heads: int, head_dim: int, columns: int, extras: str, dtype: torch.dtype, hopper: torch.device
) -> None:
    """Queries, keys and values are those of the product and the operations after it; nothing else is written."""
    tiling = {256: (256, 4), 128: (128, 6)}[columns]
    size, width = 520, (heads + 2 * kv_heads) * head_dim
    weight = normal(width, size, scale=size**-0.5, dtype=dtype)
    bias = normal(width, dtype=dtype) if extras == "bias" else None
    for num_rows in (1, 200, 3000):
        x = normal(num_rows, size, dtype=dtype)
        to = places(num_rows, kv_heads, head_dim, norm=extras == "norm", dtype=dtype)
        wanted = with_empty_caches(to)
        product = x.double() @ weight.double().T
        product = (product if bias is None else product + bias.double()).to(dtype)
        expected = rotary_and_store_reference(product, wanted)
        query = tiled_heads_linear(x, weight, bias, to, tiling)
        # A sum near the middle of two numbers is rounded to either, and the norm's result and the rotation's once more.
        eps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(query, expected, rtol=eps, atol=eps)
        torch.testing.assert_close(to.k_cache, wanted.k_cache, rtol=eps, atol=eps, equal_nan=True)
        torch.testing.assert_close(to.v_cache, wanted.v_cache, rtol=eps, atol=eps, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_dependent_launches_wait_for_each_other(assert_replays_alike: Callable[..., None]) -> None:
    layers = [
        (
            normal(4096, 1024, scale=1024**-0.5),
            normal(1024, 2048, scale=2048**-0.5),
            normal(6144, 1024, scale=1024**-0.5),
            normal(1024, 3072, scale=3 * 3072**-0.5),
        )
        for _ in range(4)
    ]
    start = normal(3000, 1024)
    to = places(3000, 8, 128, norm=True, dtype=torch.bfloat16)

    def chain(ended: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = start
        for qkv, output, gate_up, down in layers:
            query = ended(tiled_heads_linear(x, qkv, None, to, (256, 4)))
            x = ended(functional.linear(query.flatten(1), output))
            x = ended(functional.linear(ended(tiled_gated_linear(x, gate_up)), down))
        return torch.cat((x.flatten(), to.k_cache.nan_to_num().flatten(), to.v_cache.nan_to_num().flatten()))

    def reset() -> None:
        to.k_cache.fill_(NAN)
        to.v_cache.fill_(NAN)

    assert_replays_alike(chain, reset)


@pytest.mark.gpu
def test_prompts_take_it(hopper: torch.device) -> None:
    """From MIN_ROWS on, where there are tiles for most processors; else the operations are launched one by one."""
    gate_up, qkv, norm_weight = normal(6144, 1024), normal(4096, 1024), normal(1024)
    for num_rows, tiled in ((MIN_ROWS - 1, False), (MIN_ROWS, True), (4096, True)):
        x = normal(num_rows, 1024)
        assert can_be_gated(x, gate_up) == tiled
        normed = rms_norm(x, norm_weight, 1e-6)
        if tiled:
            out = norm_gated_linear(x, None, norm_weight, 1e-6, gate_up)[0]
            assert torch.equal(out, tiled_gated_linear(normed, gate_up))
    for num_rows, tiling in ((MIN_ROWS, None), (512, (128, 6)), (4096, (256, 4))):
        x = normal(num_rows, 1024)
        to = places(num_rows, 8, 128, norm=True, dtype=torch.bfloat16)
        assert heads_tiling(x, qkv, to) == tiling
        query = norm_heads_linear(x, None, norm_weight, 1e-6, qkv, None, to)[0]
        normed = rms_norm(x, norm_weight, 1e-6)
        if tiling is None:
            expected = rotary_and_store(functional.linear(normed, qkv), to)
        else:
            expected = tiled_heads_linear(normed, qkv, None, to, tiling)
        assert torch.equal(query, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "other",
    [
        lambda x, weight: (x.float(), weight.float()),
        lambda x, weight: (x[:, :300].contiguous(), weight[:, :300].contiguous()),
        lambda x, weight: (x[:, :516].contiguous(), weight[:, :516].contiguous()),
        lambda x, weight: (x, weight[:3056]),
        lambda x, weight: (x[:512], weight[:1024]),
        lambda x, weight: (x.repeat(1, 5), weight.repeat(1, 5)),
    ],
    ids=["float32", "few steps", "unaligned", "odd columns", "few tiles", "many steps"],
)
def test_what_it_does_not_take(
    other: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], hopper: torch.device
) -> None:
    x, weight = normal(4096, 520), normal(3072, 520)
    assert can_be_gated(x, weight)
    assert not can_be_gated(*other(x, weight))


@pytest.mark.gpu
def test_heads_that_it_does_not_take(hopper: torch.device) -> None:
    """Heads that turn in part, of another size, and where a tile would have a query's and a key's."""
    for heads, kv_heads, head_dim, rotated, taken in (
        (16, 8, 128, 128, True),
        (16, 8, 128, 64, False),
        (16, 8, 80, 80, False),
        (9, 3, 64, 64, False),
    ):
        weight = normal((heads + 2 * kv_heads) * head_dim, 512)
        to = places(8192, kv_heads, head_dim, norm=False, dtype=torch.bfloat16)
        to = replace(to, cos_sin=to.cos_sin[:, :rotated].contiguous())
        assert (heads_tiling(normal(8192, 512), weight, to) is not None) == taken


def test_a_cpu_does_not_take_it() -> None:
    x, weight = torch.empty(4096, 512, dtype=torch.bfloat16), torch.empty(4096, 512, dtype=torch.bfloat16)
    assert not can_be_gated(x, weight)
    none = torch.empty(0)
    cache = torch.empty(1, 16, 8, 128, dtype=torch.bfloat16)
    assert heads_tiling(x, weight, HeadPlaces(None, None, 1e-6, none, torch.empty(9, 128), cache, cache, none)) is None
