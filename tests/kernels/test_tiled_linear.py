"""Products of many rows with what follows them, on a Hopper GPU, against float64 and the operations one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from paceline.kernels import tiled_linear
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


class H200:
    """Tensors without content that count as an H200's, and how products of them are cut."""

    def tiling(
        self, num_rows: int, size: int, heads: int, kv_heads: int, head_dim: int, rotated: int
    ) -> tuple[int, int] | None:
        none = torch.empty(0)
        cache = self.tensor(1, BLOCK_SIZE, kv_heads, head_dim)
        places = HeadPlaces(None, None, 1e-6, none, torch.empty(9, rotated), cache, cache, none)
        weight = self.tensor((heads + 2 * kv_heads) * head_dim, size)
        return heads_tiling(self.tensor(num_rows, size), weight, places)

    @staticmethod
    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> H200:
    monkeypatch.setattr(tiled_linear, "is_hopper", lambda device: True)
    monkeypatch.setattr(tiled_linear, "num_processors", lambda device: 132)
    return H200()


@pytest.mark.parametrize(
    ("num_rows", "size", "weight_rows", "taken"),
    [
        (MIN_ROWS, 1024, 6144, True),
        (MIN_ROWS - 1, 1024, 6144, False),
        (4096, 328, 3072, True),
        (4096, 320, 3072, False),  # fewer steps than the ring has stages
        (4096, 332, 3072, False),  # rows that are not aligned to 16 bytes
        (4096, 2048, 3072, True),
        (4096, 2056, 3072, False),  # the library is better at a GPU's limit of power
        (4096, 1024, 3136, True),
        (4096, 1024, 3104, False),  # up begins within a turn of rows
        (1024, 1024, 1536, True),  # 96 tiles
        (1024, 1024, 1408, False),  # 88 tiles
    ],
)
def test_which_gated_products_it_takes(num_rows: int, size: int, weight_rows: int, taken: bool, h200: H200) -> None:
    x, weight = h200.tensor(num_rows, size), h200.tensor(weight_rows, size)
    assert can_be_gated(x, weight) == taken
    assert can_be_gated(x.half(), weight.half()) == taken
    assert not can_be_gated(x.float(), weight.float())


@pytest.mark.parametrize(
    ("num_rows", "size", "heads", "kv_heads", "head_dim", "rotated", "tiling"),
    [
        (MIN_ROWS, 1024, 16, 8, 128, 128, None),
        (257, 1024, 16, 8, 128, 128, (128, 6)),
        (2048, 1024, 16, 8, 128, 128, (128, 6)),
        (2049, 1024, 16, 8, 128, 128, (256, 4)),
        (8192, 320, 16, 8, 128, 128, (256, 4)),  # steps for a ring of four stages, but not of six
        (2048, 320, 16, 8, 128, 128, None),
        (8192, 2056, 16, 8, 128, 128, None),
        (8192, 1024, 16, 8, 128, 64, None),  # heads turn in part
        (8192, 1024, 16, 8, 80, 80, None),
        (8192, 1024, 15, 8, 128, 128, (128, 6)),  # tiles of 256 would have a query's head and a key's
        (8192, 1024, 16, 1, 128, 128, (128, 6)),
        (8192, 1024, 14, 2, 64, 64, (128, 6)),
        (8192, 1024, 9, 3, 64, 64, None),
    ],
)
def test_how_heads_are_cut(
    num_rows: int,
    size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
    tiling: tuple[int, int] | None,
    h200: H200,
) -> None:
    assert h200.tiling(num_rows, size, heads, kv_heads, head_dim, rotated) == tiling


def test_a_cpu_does_not_take_it() -> None:
    x, weight = torch.empty(4096, 512, dtype=torch.bfloat16), torch.empty(4096, 512, dtype=torch.bfloat16)
    assert not can_be_gated(x, weight)
    none = torch.empty(0)
    cache = torch.empty(1, 16, 8, 128, dtype=torch.bfloat16)
    assert heads_tiling(x, weight, HeadPlaces(None, None, 1e-6, none, torch.empty(9, 128), cache, cache, none)) is None
