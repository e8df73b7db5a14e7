"""Attention of decode steps: the engine's paged kernel beside the plain ways, over context lengths and batches.

    ./launch.sh bench decode_attention [--contexts 512 32768] [--batches 1 256] [--heads 32/8/128] [--write]

Ways: `gather, softmax` copies the cache's blocks together and uses two products and a softmax; `gather, SDPA` does the
same with PyTorch's fused attention; `SDPA` finds keys and values contiguous, as no engine with a paged cache has them;
`naive Triton` has one program a row and head; `Triton, paged` is the engine's first kernel, which GPUs other than
Hopper still have; `paceline` is what the engine takes here, by kernels/paged_decode_attention.py.

Each way is compared with float32 before it is timed. Bandwidths count keys and values read once. --write also draws
docs/decode-attention.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import attention_baselines as baselines
import gpu_timing
import report
import torch
from crossover import crossover
from decode_attention_plot import draw

from paceline.kernels.decode_work import DecodeWork, plan_decode
from paceline.kernels.paged_decode_attention import paged_decode_attention, paged_decode_attention_triton

CONTEXTS = (512, 2048, 8192, 32768)
BATCHES = (1, 16, 128)
HEADS = ((16, 8, 128), (32, 8, 128), (32, 8, 64))
"""Query heads, KV heads and head size: Qwen3-0.6B's, Qwen3-8B's and Llama-3.2-1B's."""
BLOCK_SIZE = 16
MAX_ERROR = 1e-2
"""Of bfloat16 results against float32: weights and results are rounded."""
CHECKED_ROWS = 8
OURS = "paceline"
PLOT = Path(__file__).parents[1] / "docs" / "decode-attention.png"


@dataclass(frozen=True)
class Step:
    """One decode step's inputs on the GPU; every row has the same length."""

    q: torch.Tensor
    """[R, H, D]."""
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    """[NB, BLOCK_SIZE, K, D]."""
    block_tables: torch.Tensor
    """[R, B] int32."""
    seq_lens: torch.Tensor
    """[R] int32."""
    slots: torch.Tensor
    """[R] int32: row r's table is block_tables[slots[r]]."""
    query_start: torch.Tensor
    """[R + 1] int32."""
    length: int
    contiguous: tuple[torch.Tensor, torch.Tensor]
    """Keys and values, [R, K, L, D]."""
    out: torch.Tensor
    work: DecodeWork
    """A step deals its rows out once for all layers, so that is no part of what is timed."""

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the rows' keys and values together."""
        keys, values = (
            baselines.gather(cache, self.block_tables, self.length) for cache in (self.k_cache, self.v_cache)
        )
        return keys, values


def paged(step: Step, attend: Callable[..., None] = paged_decode_attention) -> torch.Tensor:
    """The engine's kernel, or another of its form; the one place that knows how it is called."""
    # fmt: off
    attend(
        step.q, step.k_cache, step.v_cache, step.block_tables, step.slots, step.query_start, step.seq_lens, step.scale,
        step.out, step.work,
    )
    # fmt: on
    return step.out


WAYS: dict[str, Callable[[Step], torch.Tensor]] = {
    "gather, softmax": lambda step: baselines.softmax_attention(step.q, *step.gathered(), step.scale),
    "gather, SDPA": lambda step: baselines.sdpa(step.q, *step.gathered(), step.scale),
    "SDPA": lambda step: baselines.sdpa(step.q, *step.contiguous, step.scale),
    "naive Triton": lambda step: baselines.naive_triton(
        step.q, step.k_cache, step.v_cache, step.block_tables, step.seq_lens, step.scale, step.out
    ),
    "Triton, paged": lambda step: paged(step, paged_decode_attention_triton),
    OURS: paged,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--heads", type=heads, nargs="+", default=HEADS, metavar="H/K/D")
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments = parser.parse_args()
    gpu_timing.require_gpu()
    torch.manual_seed(0)
    copy = gpu_timing.copy_bandwidth()
    print(f"copy: {copy / 1e12:.2f} TB/s")
    print("heads      batch context  way              error        ms    GB/s  of copy  memory MiB")
    figures = []
    for shape in arguments.heads:
        for batch in arguments.batches:
            for context in sorted(arguments.contexts):
                for figure in measure(shape, batch, context, copy):
                    print_figure(figure)
                    figures.append(figure)
    crossings = list(crossovers(figures))
    for crossing in crossings:
        since = "never" if crossing["context"] is None else f"from {crossing['context']} tokens on"
        print(f"{crossing['heads']}, {crossing['batch']} at once: faster than {crossing['way']} {since}")
    if arguments.write:
        results = {"copy_gb_s": copy / 1e9, "figures": figures, "crossovers": crossings}
        report.write("decode_attention", results)
        draw(results, PLOT)


def heads(text: str) -> tuple[int, int, int]:
    """H/K/D of the command line."""
    query_heads, kv_heads, head_dim = map(int, text.split("/"))
    return query_heads, kv_heads, head_dim


@torch.inference_mode()
def measure(shape: tuple[int, int, int], batch: int, context: int, copy: float) -> Iterator[dict[str, Any]]:
    """Check and time every way at one shape; copy in bytes a second.

    A way that runs out of memory is a figure too, with no time.
    """
    named = {"heads": "/".join(map(str, shape)), "batch": batch, "context": context}
    nbytes = 2 * 2 * batch * context * shape[1] * shape[2]
    steps = make_steps(shape, batch, context, gpu_timing.copies_beyond_cache(nbytes) if nbytes < 1 << 30 else 1)
    rows = torch.linspace(0, batch - 1, min(batch, CHECKED_ROWS), device="cuda").long()
    first = steps[0]
    expected = baselines.float32_attention(
        first.q[rows], first.k_cache, first.v_cache, first.block_tables[rows], context, first.scale
    )
    for name, way in WAYS.items():
        try:
            first.out.fill_(float("nan"))
            error = gpu_timing.relative_error(way(first)[rows], expected)
            seconds = gpu_timing.seconds_a_call([partial(way, step) for step in steps])
            workspace = gpu_timing.workspace_bytes(partial(way, first)) / 2**20
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            yield {**named, "way": name, "error": None, "ms": None, "gb_s": None, "of_copy": None, "memory_mib": None}
            continue
        gpu_timing.check_error(f"{name} at {named}", error, MAX_ERROR)
        rate = nbytes / seconds
        yield {
            **named,
            "way": name,
            "error": error,
            "ms": seconds * 1e3,
            "gb_s": rate / 1e9,
            "of_copy": rate / copy,
            "memory_mib": workspace,
        }


def make_steps(shape: tuple[int, int, int], batch: int, context: int, count: int) -> list[Step]:
    """So many steps over one cache; each has blocks of its own, in random order."""
    query_heads, kv_heads, head_dim = shape
    blocks = -(-context // BLOCK_SIZE)
    cache_shape = (count * batch * blocks, BLOCK_SIZE, kv_heads, head_dim)
    k_cache, v_cache = (random_bfloat16(*cache_shape) for _ in range(2))
    tables = torch.randperm(cache_shape[0], dtype=torch.int32, device="cuda").view(count, batch, blocks)
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    query_start = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    work = plan_decode(query_start, seq_lens, kv_heads)
    steps = []
    for table in tables:
        q = random_bfloat16(batch, query_heads, head_dim)
        contiguous = baselines.gather(k_cache, table, context), baselines.gather(v_cache, table, context)
        steps.append(
            Step(
                q=q,
                k_cache=k_cache,
                v_cache=v_cache,
                block_tables=table,
                seq_lens=seq_lens,
                slots=query_start[:-1],
                query_start=query_start,
                length=context,
                contiguous=contiguous,
                out=torch.empty_like(q),
                work=work,
            )
        )
    return steps


def random_bfloat16(*shape: int) -> torch.Tensor:
    """Standard normal values on the GPU."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def print_figure(figure: dict[str, Any]) -> None:
    start = f"{figure['heads']:10} {figure['batch']:5} {figure['context']:7}  {figure['way']:15}"
    if figure["ms"] is None:
        print(f"{start}  does not fit in memory")
        return
    print(
        f"{start} {figure['error']:7.1e} {figure['ms']:9.4f} {figure['gb_s']:7.0f}  {figure['of_copy']:7.0%}  "
        f"{figure['memory_mib']:10.1f}"
    )


def crossovers(figures: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """From which context on the engine's kernel is the faster one, for each shape, batch and other way."""
    groups: dict[tuple[str, int], dict[str, dict[int, float | None]]] = {}
    for figure in figures:
        ways = groups.setdefault((figure["heads"], figure["batch"]), {})
        ways.setdefault(figure["way"], {})[figure["context"]] = figure["ms"]
    for (shape, batch), ways in groups.items():
        for way, times in ways.items():
            if way != OURS:
                yield {"heads": shape, "batch": batch, "way": way, "context": crossover(ways[OURS], times)}


if __name__ == "__main__":
    main()
