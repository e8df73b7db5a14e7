"""Matrix products of a decode step: the engine's kernels beside cuBLAS, for the models' layers and rows.

    ./launch.sh bench gemm [--models qwen3-8b] [--rows 1 16] [--write]

A product of few rows is bound by reading the weight, so the measure is bytes a second against a copy's. Weights take
turns, so that the L2 cache serves none of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu_timing
import models
import report
import torch
from torch.nn import functional

from paceline.kernels.linear import linear
from paceline.kernels.skinny_linear import MAX_ROWS
from paceline.kernels.tiled_linear import MAX_BUCKET, bucket_of, candidate_tiles, tiled_linear

Kernel = Callable[..., torch.Tensor]

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_ERROR = 5e-3
"""Of bfloat16 results against float32: one rounding is 1.7e-3 on average."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(models.MODELS), default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments = parser.parse_args()
    gpu_timing.require_gpu()
    torch.manual_seed(0)
    copy = gpu_timing.copy_bandwidth()
    print(f"copy: {copy / 1e12:.2f} TB/s")
    print("     N      K    M  kernel          error       us   TB/s  of copy  TFLOP/s")
    figures = []
    for n, k in shapes(arguments.models):
        for figure in measure(n, k, arguments.rows, copy):
            print(
                f"{n:6} {k:6} {figure['rows']:4}  {figure['kernel']:12} {figure['error']:8.1e} {figure['us']:8.2f} "
                f"{figure['tb_s']:6.2f}  {figure['of_copy']:7.0%}  {figure['tflop_s']:7.1f}"
            )
            figures.append(figure)
    if arguments.write:
        report.write("gemm", {"copy_tb_s": copy / 1e12, "figures": figures})


def shapes(names: list[str]) -> list[tuple[int, int]]:
    """The (N, K) of all products of the named models, each once."""
    return list(dict.fromkeys(shape for name in names for shape in models.products(name).values()))


@torch.inference_mode()
def measure(n: int, k: int, rows: list[int], copy: float) -> Iterator[dict[str, Any]]:
    """Check and time each kernel at each number of rows with weights [n, k] in bfloat16; copy in bytes a second."""
    count = gpu_timing.copies_beyond_cache(2 * n * k)
    weights = [random_bfloat16(n, k, k**-0.5) for _ in range(count)]
    wide = weights[0].float()
    for m in rows:
        inputs = [random_bfloat16(m, k, 1.0) for _ in range(count)]
        expected = inputs[0].float() @ wide.t()
        for name, kernel in kernels(m).items():
            error = gpu_timing.relative_error(kernel(inputs[0], weights[0]), expected)
            gpu_timing.check_error(f"{name} at {m} x {n} x {k}", error, MAX_ERROR)
            seconds = gpu_timing.seconds_a_call(
                [partial(kernel, x, weight) for x, weight in zip(inputs, weights, strict=True)]
            )
            moved = 2 * (n * k + m * k + m * n)
            yield {
                "n": n,
                "k": k,
                "rows": m,
                "kernel": name,
                "error": error,
                "us": seconds * 1e6,
                "tb_s": moved / seconds / 1e12,
                "of_copy": moved / seconds / copy,
                "tflop_s": 2 * m * n * k / seconds / 1e12,
            }


def kernels(rows: int) -> dict[str, Kernel]:
    """What is timed at so many rows: the library, and of ours the one for few rows or every tile."""
    named: dict[str, Kernel] = {"cuBLAS": functional.linear}
    if rows <= MAX_ROWS:
        named["skinny"] = linear
    elif rows <= MAX_BUCKET:
        for tile in candidate_tiles(bucket_of(rows)):
            named[f"{tile.rows}x{tile.columns}x{tile.inner}"] = partial(tiled_linear, tile=tile)
    return named


def random_bfloat16(rows: int, columns: int, scale: float) -> torch.Tensor:
    """[rows, columns] normal values with that standard deviation, on the GPU."""
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_(0.0, scale)


if __name__ == "__main__":
    main()
