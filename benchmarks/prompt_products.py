"""Products of prompts with what follows them: one kernel, beside the library's product and a kernel after it.

    ./launch.sh bench prompt_products [--models qwen3-0.6b] [--rows 1024 8192] [--write]

`heads` is the product for queries, keys and values, with their norm, rotation and storing in the cache; `gated` that
of gate and up, with the activation. The library's product alone stands beside both: what follows it is what can be
saved. Each way is compared with float32 before it is timed. All ways of a line take turns, five times, since products
of this size make a GPU lower its clock: the median of each is given.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gpu_timing
import models
import report
import torch
from gemm import MAX_ERROR, activated, library_gated, random_bfloat16
from torch.nn import functional

from paceline.kernels.rotary_and_store import HeadPlaces, rotary_and_store, rotary_and_store_reference
from paceline.kernels.tiled_linear import can_be_gated, heads_tiling, tiled_gated_linear, tiled_heads_linear

Way = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The result of rows [M, K] and a weight [N, K]."""

MODELS = ("qwen3-0.6b", "llama3.2-1b")
"""Others have too long an inner dimension."""
ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)
BLOCK_SIZE = 16
ROUNDS = 5
APART, ALONE, TOGETHER = "two kernels", "product alone", "one kernel"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(models.MODELS), default=MODELS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments = parser.parse_args()
    gpu_timing.require_gpu()
    torch.manual_seed(0)
    print(f"{'model':12} {'what':6} {'rows':>6}  {APART:>12} {ALONE:>14} {TOGETHER:>12}   gain  TFLOP/s  memory MiB")
    figures = []
    for name in arguments.models:
        for figure in measure(name, arguments.rows):
            us = figure["us"]
            print(
                f"{name:12} {figure['what']:6} {figure['rows']:6}  {us[APART]:9.1f} us {us[ALONE]:11.1f} us "
                + (
                    f"{us[TOGETHER]:9.1f} us {us[APART] / us[TOGETHER]:6.3f} {figure['tflop_s']:8.0f} "
                    f"{figure['memory_mib']:11.1f}"
                    if TOGETHER in us
                    else "            is not faster, and not used"
                )
            )
            figures.append(figure)
    if arguments.write:
        report.write("prompt_products", {"figures": figures})


@torch.inference_mode()
def measure(name: str, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Check and time both products of a model at each number of rows."""
    shapes = models.products(name)
    for what, shape in (("heads", shapes["qkv"]), ("gated", shapes["gate and up"])):
        count = gpu_timing.copies_beyond_cache(2 * shape[0] * shape[1])
        weights = [random_bfloat16(*shape, shape[1] ** -0.5) for _ in range(count)]
        for num_rows in rows:
            inputs = [random_bfloat16(num_rows, shape[1], 1.0) for _ in range(count)]
            ways, expected = ways_of(what, name, inputs[0], weights[0])
            for way, call in ways.items():
                if way != ALONE:
                    error = gpu_timing.relative_error(call(inputs[0], weights[0]), expected)
                    gpu_timing.check_error(f"{way} of {what} at {num_rows} rows", error, MAX_ERROR)
            del expected
            pairs = list(zip(inputs, weights, strict=True))
            us = {way: [partial(call, *pair) for pair in pairs] for way, call in ways.items()}
            seconds = {way: statistics.median(times) for way, times in in_turns(us).items()}
            yield {
                "model": name,
                "what": what,
                "rows": num_rows,
                "us": {way: value * 1e6 for way, value in seconds.items()},
                "tflop_s": 2 * num_rows * shape[0] * shape[1] / seconds.get(TOGETHER, seconds[APART]) / 1e12,
                "memory_mib": gpu_timing.workspace_bytes(us[TOGETHER if TOGETHER in us else APART][0]) / 2**20,
            }


def in_turns(ways: dict[str, list[partial[torch.Tensor]]]) -> dict[str, list[float]]:
    """Seconds of one call of each way, in each round."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, calls in ways.items():
            times[way].append(gpu_timing.seconds_a_call(calls))
    return times


def ways_of(what: str, name: str, x: torch.Tensor, weight: torch.Tensor) -> tuple[dict[str, Way], torch.Tensor]:
    """What is timed for such rows and weights, and the result in float32; one kernel only where the engine takes it."""
    product = x.float() @ weight.float().t()
    if what == "gated":
        ways: dict[str, Way] = {APART: library_gated, ALONE: functional.linear}
        if can_be_gated(x, weight):
            ways[TOGETHER] = tiled_gated_linear
        return ways, activated(product, True)
    heads = places(name, x.shape[0])
    tiling = heads_tiling(x, weight, heads)
    ways = {APART: lambda x, weight: rotary_and_store(functional.linear(x, weight), heads), ALONE: functional.linear}
    if tiling is not None:
        ways[TOGETHER] = lambda x, weight: tiled_heads_linear(x, weight, None, heads, tiling)
    return ways, rotary_and_store_reference(product.to(x.dtype), heads)


def places(name: str, num_rows: int) -> HeadPlaces:
    """Where the heads of one prompt of so many tokens go."""
    config = models.MODELS[name]
    head_dim, has_norm = config["head_dim"], name.startswith("qwen3")
    cache = (-(-num_rows // BLOCK_SIZE), BLOCK_SIZE, config["num_key_value_heads"], head_dim)
    angles = torch.rand(num_rows, head_dim // 2, device="cuda") * 6.28
    return HeadPlaces(
        q_norm=random_bfloat16(1, head_dim, 1.0)[0] if has_norm else None,
        k_norm=random_bfloat16(1, head_dim, 1.0)[0] if has_norm else None,
        eps=config["rms_norm_eps"],
        positions=torch.arange(num_rows, dtype=torch.int32, device="cuda"),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1),
        k_cache=torch.empty(cache, dtype=torch.bfloat16, device="cuda"),
        v_cache=torch.empty(cache, dtype=torch.bfloat16, device="cuda"),
        slot_mapping=torch.arange(num_rows, device="cuda"),
    )


if __name__ == "__main__":
    main()
