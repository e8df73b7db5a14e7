"""Storing keys and values in the paged cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.store_kv import store_kv, store_kv_reference, store_kv_triton

Store = Callable[..., None]


def check(store: Store, slots: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """Store views of a fused projection and look up every slot of the caches afterwards."""
    qkv = torch.randn(len(slots), 15 * 32, device=device).to(dtype)
    k, v = (part.view(-1, 3, 32) for part in qkv[:, 9 * 32 :].chunk(2, dim=1))
    k_cache, v_cache = torch.randn(2, 4, 16, 3, 32, device=device).to(dtype).unbind(0)
    expected_k, expected_v = k_cache.clone().view(-1, 3, 32), v_cache.clone().view(-1, 3, 32)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected_k[slot], expected_v[slot] = k[token], v[token]
    store(k, v, k_cache, v_cache, torch.tensor(slots, device=device))
    assert torch.equal(k_cache.view(-1, 3, 32), expected_k)
    assert torch.equal(v_cache.view(-1, 3, 32), expected_v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slots", [[63, 0, 17, 18], [5, -1, 40, -1, 2], [-1, -1]])
@pytest.mark.parametrize("store", [store_kv_reference, store_kv_triton])
def test_writes_its_slots_and_no_other(
    store: Store, slots: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    check(store, slots, dtype, device)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31() -> None:
    num_blocks = 2**31 // (16 * 8 * 128) + 4
    k_cache, v_cache = (torch.zeros(num_blocks, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k, v = torch.randn(2, 1, 8, 128, device="cuda").to(torch.bfloat16).unbind(0)
    store_kv(k, v, k_cache, v_cache, torch.tensor([num_blocks * 16 - 1], device="cuda"))
    assert torch.equal(k_cache[-1, -1], k[0])
    assert torch.equal(v_cache[-1, -1], v[0])
    assert not k_cache[:-1].any()
