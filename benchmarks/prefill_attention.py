"""Attention of prompts: the engine's paged kernels beside the plain ways, over prompt lengths.

    ./launch.sh bench prefill_attention [--heads 16/8/128] [--prompts 1x4096 4x4000] [--write]
    ./launch.sh bench prefill_attention --tune [--heads 16/8/128] [--prompts 4x4000]

Ways: `softmax` computes all scores in memory; `SDPA` is PyTorch's fused attention on contiguous keys and values, as no
engine with a paged cache has them; `naive Triton` and `first paged` are the kernels of prefill_kernels.py; `Triton` and
`Hopper` are this project's two of today. --tune times these two with every shape of tile that does not spill registers.

Each way is compared with float32 before it is timed. A prompt of L tokens counts 4 x heads x head size operations for
each of its L (L + 1) / 2 pairs of query and visible key. The ceiling is the rate of a bfloat16 product of 8192 x 8192
matrices of random values, measured first. --write also draws docs/prefill-attention.png.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_timing
import prefill_kernels
import report
import torch
from crossover import crossover
from prefill_attention_plot import draw
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.kernels.paged_prefill_attention_hopper import fits_hopper_kernel, paged_prefill_attention_hopper
from paceline.kernels.paged_prefill_attention_triton import Tile, paged_prefill_attention_triton

Heads = tuple[int, int, int]
"""Query heads, KV heads and head size."""
Prompts = tuple[int, int]
"""How many prompts, and tokens of each."""

HEADS: tuple[Heads, ...] = ((16, 8, 128), (32, 8, 128))
PROMPTS: tuple[Prompts, ...] = (
    *((1, length) for length in (256, 512, 1024, 2048, 4096, 8192, 16384)),
    (16, 1024),
    (4, 4000),
)
BLOCK_SIZE = 16
MAX_ERROR = 1e-2
"""Of bfloat16 results against float32: weights and results are rounded."""
QUERIES_AT_ONCE = 1024
"""What the ways are compared with takes a head's queries in chunks of this many, which bounds its scores."""
MOST_SCORE_BYTES = 4 << 30
"""The way that has all scores in memory takes no more than this for them in float32."""
SIDE = 8192
OURS = "Hopper"
PLOT = Path(__file__).parents[1] / "docs" / "prefill-attention.png"
HEADER = "heads      prompts    way               error        ms  TFLOP/s  of ceiling  memory MiB"

TILES = {
    64: (
        Tile(64, 64, 4, 3, False),
        Tile(64, 128, 4, 2, False),
        Tile(128, 64, 8, 3, False),
        Tile(128, 128, 8, 3, False),
        Tile(64, 64, 4, 3, True),
        Tile(128, 64, 8, 3, True),
        Tile(128, 128, 8, 3, True),
    ),
    128: (
        Tile(64, 64, 4, 3, False),
        Tile(64, 128, 4, 2, False),
        Tile(128, 64, 8, 3, False),
        Tile(128, 128, 8, 2, False),
        Tile(128, 128, 8, 3, False),
        Tile(64, 64, 4, 3, True),
        Tile(128, 64, 8, 2, True),
        Tile(128, 64, 8, 3, True),
    ),
}
HOPPER_TILES = {64: ((128, 2), (128, 3), (64, 4)), 128: ((128, 2), (64, 3), (64, 4))}
"""By head size: keys at a time, and stages."""


@dataclass(frozen=True)
class Batch:
    """Whole prompts of one length on the GPU, their keys and values both in a paged cache and contiguous."""

    q: torch.Tensor
    """[T, H, D]; prompts one after the other."""
    keys: torch.Tensor
    values: torch.Tensor
    """[T, K, D]."""
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    """[NB, BLOCK_SIZE, K, D], blocks in random order."""
    block_tables: torch.Tensor
    """[R, B] int32."""
    slots: torch.Tensor
    """[R] int32: row r's table is block_tables[slots[r]]."""
    query_start: torch.Tensor
    """[R + 1] int32."""
    seq_lens: torch.Tensor
    """[R] int32."""
    length: int
    out: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    @property
    def operations(self) -> float:
        tokens, heads, head_dim = self.q.shape
        return 4.0 * heads * head_dim * tokens * (self.length + 1) / 2

    def by_prompt(self, tokens: torch.Tensor) -> torch.Tensor:
        """View [T, N, D] as [R, N, L, D]."""
        return tokens.unflatten(0, (-1, self.length)).transpose(1, 2)


def softmax(batch: Batch) -> torch.Tensor:
    """Two matrix products and a softmax."""
    queries = batch.by_prompt(batch.q)
    group = queries.shape[1] // batch.keys.shape[1]
    keys, values = (batch.by_prompt(each).repeat_interleave(group, dim=1) for each in (batch.keys, batch.values))
    hidden = torch.ones(batch.length, batch.length, dtype=torch.bool, device=batch.q.device).triu(1)
    scores = (queries @ keys.transpose(2, 3) * batch.scale).masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return (weights @ values).transpose(1, 2).reshape(batch.q.shape)


def sdpa(batch: Batch) -> torch.Tensor:
    """PyTorch's fused attention: cuDNN's, or FlashAttention where that takes no such shape."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        attended = functional.scaled_dot_product_attention(
            *(batch.by_prompt(each) for each in (batch.q, batch.keys, batch.values)),
            is_causal=True, scale=batch.scale, enable_gqa=True,
        )  # fmt: skip
    return attended.transpose(1, 2).reshape(batch.q.shape)


def naive_triton(batch: Batch) -> torch.Tensor:
    prefill_kernels.naive(batch.q, batch.keys, batch.values, batch.length, batch.scale, batch.out)
    return batch.out


def first_paged(batch: Batch) -> torch.Tensor:
    prefill_kernels.earlier(
        batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.query_start, batch.seq_lens, batch.length,
        batch.scale, batch.out,
    )  # fmt: skip
    return batch.out


def paged(kernel: Callable[..., None], batch: Batch) -> torch.Tensor:
    """A kernel of the engine; the one place that knows how they are called."""
    kernel(
        batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.slots, batch.query_start, batch.seq_lens,
        batch.scale, batch.out,
    )  # fmt: skip
    return batch.out


Way = Callable[[Batch], torch.Tensor]
WAYS: dict[str, Way] = {
    "softmax": softmax,
    "SDPA": sdpa,
    "naive Triton": naive_triton,
    "first paged": first_paged,
    "Triton": partial(paged, paged_prefill_attention_triton),
    OURS: partial(paged, paged_prefill_attention_hopper),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=heads, nargs="+", default=HEADS, metavar="H/K/D")
    parser.add_argument("--prompts", type=prompts, nargs="+", default=PROMPTS, metavar="NxL")
    parser.add_argument("--tune", action="store_true", help="time the shapes of tiles instead")
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments = parser.parse_args()
    gpu_timing.require_gpu()
    torch.manual_seed(0)
    ceiling = product_rate()
    print(f"product of matrices of side {SIDE}: {ceiling / 1e12:.0f} TFLOP/s\n{HEADER}")
    figures = []
    for shape in arguments.heads:
        for sizes in arguments.prompts:
            for figure in measure(tiled_ways(shape[2]) if arguments.tune else WAYS, shape, sizes, ceiling):
                print_figure(figure)
                figures.append(figure)
    if arguments.tune:
        return
    crossings = list(crossovers(figures))
    for crossing in crossings:
        since = "never" if crossing["length"] is None else f"from {crossing['length']} tokens on"
        print(f"{crossing['heads']}, one prompt: {OURS} is faster than {crossing['way']} {since}")
    if arguments.write:
        results = {"ceiling_tflop_s": ceiling / 1e12, "figures": figures, "crossovers": crossings}
        report.write("prefill_attention", results)
        draw(results, PLOT)


def heads(text: str) -> Heads:
    """H/K/D of the command line."""
    query_heads, kv_heads, head_dim = map(int, text.split("/"))
    return query_heads, kv_heads, head_dim


def prompts(text: str) -> Prompts:
    """NxL of the command line."""
    count, length = map(int, text.split("x"))
    return count, length


@torch.inference_mode()
def product_rate() -> float:
    """Operations a second of a large bfloat16 matrix product."""
    left, right = torch.randn(2, SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(left)
    return 2.0 * SIDE**3 / gpu_timing.seconds_a_call([lambda: torch.mm(left, right, out=out)])


def tiled_ways(head_dim: int) -> dict[str, Way]:
    """The engine's kernels with each shape of tile."""
    ways: dict[str, Way] = {}
    for tile in TILES[head_dim]:
        name = f"{tile.block_m}/{tile.block_n}/{tile.num_warps}/{tile.num_stages}{' ov' if tile.overlap else ''}"
        ways[name] = partial(paged, partial(paged_prefill_attention_triton, tile=tile))
    for block_n, stages in HOPPER_TILES[head_dim]:
        kernel = partial(paged_prefill_attention_hopper, block_n=block_n, stages=stages)
        ways[f"{OURS} {block_n}/{stages}"] = partial(paged, kernel)
    return ways


@torch.inference_mode()
def measure(ways: dict[str, Way], shape: Heads, sizes: Prompts, ceiling: float) -> Iterator[dict[str, Any]]:
    """Check and time each way at one shape; ceiling in operations a second."""
    batch = make_batch(shape, sizes)
    expected = float32_attention(batch)
    named = {"heads": "/".join(map(str, shape)), "prompts": sizes[0], "length": sizes[1]}
    for name, way in ways.items():
        if name == "softmax" and 4 * shape[0] * sizes[0] * sizes[1] ** 2 > MOST_SCORE_BYTES:
            continue
        if name.startswith(OURS) and not fits_hopper_kernel(batch.q, batch.k_cache):
            continue
        batch.out.fill_(float("nan"))
        error = gpu_timing.relative_error(way(batch), expected)
        gpu_timing.check_error(f"{name} at {named}", error, MAX_ERROR)
        workspace = gpu_timing.workspace_bytes(partial(way, batch)) / 2**20
        seconds = gpu_timing.seconds_a_call([partial(way, batch)])
        rate = batch.operations / seconds
        yield {
            **named,
            "way": name,
            "error": error,
            "ms": seconds * 1e3,
            "tflop_s": rate / 1e12,
            "of_ceiling": rate / ceiling,
            "memory_mib": workspace,
        }


def float32_attention(batch: Batch) -> torch.Tensor:
    """What the ways are compared with, in float32, a prompt and a query head at a time: [T, H, D]."""
    # Not by scaled_dot_product_attention: on CUDA (torch 2.11, H200) its float32 result is off by 0.8 for the last of T
    # queries where T % 64 is 1, with a boolean mask and a group's keys expanded over its query heads.
    out = torch.empty(batch.q.shape, dtype=torch.float32, device=batch.q.device)
    queries, keys, values, results = (batch.by_prompt(each) for each in (batch.q, batch.keys, batch.values, out))
    prompts, heads = queries.shape[:2]
    for prompt, head in itertools.product(range(prompts), range(heads)):
        kv_head = head * keys.shape[1] // heads
        k, v = keys[prompt, kv_head].float(), values[prompt, kv_head].float()
        for start in range(0, batch.length, QUERIES_AT_ONCE):
            stop = min(start + QUERIES_AT_ONCE, batch.length)
            scores = queries[prompt, head, start:stop].float() @ k[:stop].T * batch.scale
            hidden = torch.ones_like(scores, dtype=torch.bool).triu_(start + 1)
            results[prompt, head, start:stop] = scores.masked_fill_(hidden, float("-inf")).softmax(-1) @ v[:stop]
    return out


def make_batch(shape: Heads, sizes: Prompts, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Batch:
    """Random prompts whose cache blocks lie in random order among some that are not theirs."""
    (query_heads, kv_heads, head_dim), (count, length) = shape, sizes
    blocks = -(-length // BLOCK_SIZE)
    ids = torch.randperm(count * blocks + 64, device=device)[: count * blocks].view(count, blocks)
    positions = torch.arange(length, device=device)
    slots = (ids[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
    normal = partial(torch.randn, dtype=dtype, device=device)
    keys, values = (normal(count * length, kv_heads, head_dim) for _ in range(2))
    k_cache, v_cache = (normal(count * blocks + 64, BLOCK_SIZE, kv_heads, head_dim) for _ in range(2))
    for cache, own in ((k_cache, keys), (v_cache, values)):
        cache.view(-1, kv_heads, head_dim)[slots] = own
    q = normal(count * length, query_heads, head_dim)
    rows = torch.arange(count + 1, device=device, dtype=torch.int32)
    return Batch(
        q, keys, values, k_cache, v_cache, ids.to(torch.int32), rows[:count], rows * length,
        torch.full((count,), length, dtype=torch.int32, device=device), length, torch.empty_like(q),
    )  # fmt: skip


def print_figure(figure: dict[str, Any]) -> None:
    size = f"{figure['prompts']} x {figure['length']}"
    print(
        f"{figure['heads']:10} {size:10} {figure['way']:16} {figure['error']:7.1e} {figure['ms']:9.4f} "
        f"{figure['tflop_s']:8.1f} {figure['of_ceiling']:10.0%}  {figure['memory_mib']:11.1f}",
        flush=True,
    )


def crossovers(figures: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """From which length of a single prompt on the Hopper kernel is the faster one, for each shape and other way."""
    groups: dict[str, dict[str, dict[int, float | None]]] = {}
    for figure in (each for each in figures if each["prompts"] == 1):
        groups.setdefault(figure["heads"], {}).setdefault(figure["way"], {})[figure["length"]] = figure["ms"]
    for shape, ways in groups.items():
        ours = ways.pop(OURS, None)
        for way, times in ways.items() if ours else ():
            # What was not measured did not fit.
            theirs = {length: times.get(length) for length in ours}
            yield {"heads": shape, "way": way, "length": crossover(ours, theirs)}


if __name__ == "__main__":
    main()
