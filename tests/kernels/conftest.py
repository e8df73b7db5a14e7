"""Fixtures of the kernel tests: the device Triton runs on, poisoned paged caches, plain attention to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

_NAN = float("nan")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the Triton kernels run: the GPU, or the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def hopper() -> torch.device:
    """A GPU that has what the kernels in Gluon use; for tests marked gpu."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return torch.device("cuda")


@pytest.fixture
def assert_replays_alike() -> Callable[..., None]:
    """Compare dependent launches in one graph, replayed often, with the same ones by themselves: to the bit.

    The chain passes each result through the function that it gets; reset undoes what it writes beside its result.
    """

    def alone(out: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return out

    def check(chain: Callable[..., torch.Tensor], reset: Callable[[], None] = lambda: None) -> None:
        expected = chain(alone)
        assert expected.isfinite().all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(lambda out: out)
        for _ in range(20):
            out.fill_(0)
            reset()
            graph.replay()
            assert torch.equal(out, expected)

    return check


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def assert_rounded() -> Callable[..., None]:
    """Compare a kernel's result with its reference, apart from `roundings` roundings to the dtype of the result."""

    def check(actual: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
        # The interpreter truncates to bfloat16 where the reference rounds, hence a whole unit a rounding.
        rtol = roundings * torch.finfo(actual.dtype).eps if actual.dtype != torch.float32 else 2e-6
        torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=rtol, atol=1e-6)

    return check


@pytest.fixture
def assert_attention() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Compare attention with its exact value, given in float64: the softmax weights and the result may be rounded."""

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        eps = max(torch.finfo(actual.dtype).eps, 5e-6)
        torch.testing.assert_close(actual.double().cpu(), expected, rtol=eps, atol=eps)

    return check


@dataclass(frozen=True)
class PagedRows:
    """Rows of keys and values in a paged cache that is NaN elsewhere; their block tables are invalid past each row."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def expected(self, q: torch.Tensor, query_lens: list[int], scale: float) -> torch.Tensor:
        """Return causal attention in float64 of each row's last tokens, which q holds row after row, on the CPU."""
        return torch.cat([self.expected_of(row, queries, scale) for row, queries in enumerate(q.split(query_lens))])

    def expected_of(self, row: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """The same of one row's last tokens, q [T, H, D]: computed where q is, a KV head at a time."""
        # Not by scaled_dot_product_attention: on CUDA (torch 2.11, H200) its float32 result is off by 0.8 for the last
        # of T queries where T % 64 is 1, with a boolean mask and a group's keys expanded over its query heads.
        group = q.shape[1] // self.keys[row].shape[1]
        last = torch.arange(len(self.keys[row]) - len(q), len(self.keys[row]), device=q.device)
        hidden = torch.arange(len(self.keys[row]), device=q.device) > last[:, None]
        entries = (each.to(q.device).double().transpose(0, 1) for each in (self.keys[row], self.values[row]))
        out = []
        for queries, keys, values in zip(q.double().transpose(0, 1).split(group), *entries, strict=True):
            scores = (queries @ keys.T * scale).masked_fill(hidden, float("-inf"))
            out.append(scores.softmax(-1) @ values)
        return torch.cat(out).transpose(0, 1).cpu()


@pytest.fixture
def make_rows(device: torch.device) -> Callable[..., PagedRows]:
    """Return a function that lays out rows of random keys and values in a shuffled, poisoned cache."""

    def make(
        seq_lens: list[int],
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int = 16,
        where: torch.device | None = None,
    ) -> PagedRows:
        shuffle = random.Random(0)
        blocks = [-(-length // block_size) for length in seq_lens]
        block_ids = list(range(sum(blocks) + 2))
        shuffle.shuffle(block_ids)
        k_cache = torch.full((len(block_ids), block_size, kv_heads, head_dim), _NAN, dtype=dtype)
        v_cache = torch.full_like(k_cache, _NAN)
        garbage = torch.tensor([-1, 2**30, -(2**31), 2**31 - 1], dtype=torch.int32)
        tables = garbage[torch.randint(4, (len(seq_lens), max(blocks) + 3))]
        keys, values = [], []
        for row, length in enumerate(seq_lens):
            own = [block_ids.pop() for _ in range(blocks[row])]
            tables[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
            slots = [block_id * block_size + offset for block_id in own for offset in range(block_size)][:length]
            keys.append(torch.randn(length, kv_heads, head_dim).to(dtype))
            values.append(torch.randn(length, kv_heads, head_dim).to(dtype))
            k_cache.view(-1, kv_heads, head_dim)[slots] = keys[-1]
            v_cache.view(-1, kv_heads, head_dim)[slots] = values[-1]
        to = device if where is None else where
        return PagedRows(
            k_cache.to(to),
            v_cache.to(to),
            tables.to(to),
            torch.tensor(seq_lens, dtype=torch.int32, device=to),
            keys,
            values,
        )

    return make
