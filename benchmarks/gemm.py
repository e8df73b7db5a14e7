"""Matrix products of a decode step: the engine's kernels beside cuBLAS, for the models' layers and rows.

    ./launch.sh bench gemm [--models qwen3-8b] [--rows 1 16] [--write]

The product of gate and up is timed with its activation, which cuBLAS has done by a kernel of the engine's after it.
A product of few rows is bound by reading the weight, so the measure is bytes a second against a copy's. Weights take
turns, so that the L2 cache serves none of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import gpu_timing
import models
import report
import torch
from torch.nn import functional

from paceline.kernels.silu_and_mul import silu_and_mul
from paceline.kernels.skinny_linear import MAX_ROWS, skinny_linear
from paceline.kernels.streamed_linear import Stream, cuts_of, make_exchange, stream_of, streamed_linear

Kernel = Callable[..., torch.Tensor]

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_ERROR = 5e-3
"""Of bfloat16 results against float32: one rounding is 1.7e-3 on average."""


class Shape(NamedTuple):
    """A weight's [n, k], and whether its halves are gate and up, whose activation is computed too."""

    n: int
    k: int
    gated: bool


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
    print("     N       K    M  kernel       error       us   TB/s  of copy  TFLOP/s")
    figures = []
    for shape in shapes(arguments.models):
        for figure in measure(shape, arguments.rows, copy):
            print(
                f"{shape.n:6}{'g' if shape.gated else ' '} {shape.k:6} {figure['rows']:4}  "
                f"{figure['kernel']:9} {figure['error']:8.1e} {figure['us']:8.2f} "
                f"{figure['tb_s']:6.2f}  {figure['of_copy']:7.0%}  {figure['tflop_s']:7.1f}"
            )
            figures.append(figure)
    if arguments.write:
        report.write("gemm", {"copy_tb_s": copy / 1e12, "figures": figures})


def shapes(names: list[str]) -> list[Shape]:
    """All products of the named models, each once."""
    products = (product for name in names for product in models.products(name).items())
    return list(dict.fromkeys(Shape(*shape, part == "gate and up") for part, shape in products))


@torch.inference_mode()
def measure(shape: Shape, rows: list[int], copy: float) -> Iterator[dict[str, Any]]:
    """Check and time each kernel at each number of rows with weights of a shape in bfloat16; copy in bytes a second."""
    n, k, gated = shape
    count = gpu_timing.copies_beyond_cache(2 * n * k)
    weights = [random_bfloat16(n, k, k**-0.5) for _ in range(count)]
    wide = weights[0].float()
    exchange = make_exchange(wide.device)
    streams = {bucket: Stream(cut, exchange) for bucket, cut in cuts_of(weights[0], gated=gated).items()}
    for m in rows:
        inputs = [random_bfloat16(m, k, 1.0) for _ in range(count)]
        expected = activated(inputs[0].float() @ wide.t(), gated)
        for name, kernel in kernels(m, gated, stream_of(inputs[0], streams)).items():
            error = gpu_timing.relative_error(kernel(inputs[0], weights[0]), expected)
            gpu_timing.check_error(f"{name} at {m} x {n} x {k}", error, MAX_ERROR)
            seconds = gpu_timing.seconds_a_call(
                [partial(kernel, x, weight) for x, weight in zip(inputs, weights, strict=True)]
            )
            moved = 2 * (n * k + m * k + expected.numel())
            yield {
                "n": n,
                "k": k,
                "gated": gated,
                "rows": m,
                "kernel": name,
                "error": error,
                "us": seconds * 1e6,
                "tb_s": moved / seconds / 1e12,
                "of_copy": moved / seconds / copy,
                "tflop_s": 2 * m * n * k / seconds / 1e12,
            }


def kernels(rows: int, gated: bool, stream: Stream | None) -> dict[str, Kernel]:
    """What is timed at so many rows: the library, the kernel for few, and the streamed product where there is one."""
    named: dict[str, Kernel] = {"cuBLAS": library_gated if gated else functional.linear}
    if rows <= MAX_ROWS:
        named["skinny"] = lambda x, weight: skinny_linear(x, weight, gated=gated)[0]
    if stream is not None:
        named["streamed"] = partial(streamed_linear, stream=stream, gated=gated)
    return named


def library_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of the library's product, with the engine's kernel for the activation."""
    return silu_and_mul(functional.linear(x, weight))


def activated(product: torch.Tensor, gated: bool) -> torch.Tensor:
    """silu(gate) * up of a product [M, N] in float32, [M, N / 2], or the product as it is."""
    if not gated:
        return product
    gate, up = product.chunk(2, dim=-1)
    return functional.silu(gate) * up


def random_bfloat16(rows: int, columns: int, scale: float) -> torch.Tensor:
    """[rows, columns] normal values with that standard deviation, on the GPU."""
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_(0.0, scale)


if __name__ == "__main__":
    main()
