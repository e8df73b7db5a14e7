"""Sampling over a large vocabulary: the Gumbel argmax alone and after filters, beside plain PyTorch.

    ./launch.sh bench sampling [--rows 1 64] [--write]

Each kernel is compared with its reference before it is timed. Bandwidths count every logit read once. Logits take
turns, so that the L2 cache serves none of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import gpu_timing
import report
import torch

from paceline.kernels.gumbel_argmax import gumbel_argmax
from paceline.kernels.gumbel_noise import gumbel_noise
from paceline.kernels.top_k_top_p import find_cutoffs, find_cutoffs_reference

VOCAB = 151936
ROWS = (1, 4, 16, 64, 256)
MAX_SHORTFALL = 1e-3
"""Most that a chosen token's score may lie below the best one by the reference."""
MAX_MASS = {"torch, sorted": 1e-3, "paceline": 1e-4}
"""Most probability that a filter may keep or drop other than its reference does: what sums in float32 are off, those of
torch over the whole vocabulary by more."""
CHECKED_ROWS = 16
RULES = {"top-k 50": (50, 1.0, 0.0), "top-p 0.9": (0, 0.9, 0.0), "k, p, min-p": (50, 0.9, 0.02)}
"""top_k, top_p, min_p."""
SPREADS = {"flat": 1.0, "peaked": 4.0}
"""Standard deviation of the logits: that of random weights, and one that leaves some 500 tokens to top-p 0.9."""

Rules = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""temperature [S] float32, top_k [S] int32, top_p [S] float32, min_p [S] float32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments = parser.parse_args()
    gpu_timing.require_gpu()
    torch.manual_seed(0)
    copy = gpu_timing.copy_bandwidth()
    print(f"copy: {copy / 1e12:.2f} TB/s; vocabulary: {VOCAB}")
    print("rows  dtype     what                    kernel            error        us   TB/s  of copy  memory MiB")
    figures = []
    for measure in (measure_argmax, measure_filtered):
        for rows in arguments.rows:
            for figure in measure(rows):
                rate = figure["bytes"] / figure["us"] * 1e6
                error = "-" if figure["error"] is None else f"{figure['error']:.1e}"
                figure |= {"tb_s": rate / 1e12, "of_copy": rate / copy}
                print(
                    f"{rows:4}  {figure['dtype']:8}  {figure['what']:22}  {figure['kernel']:13}  "
                    f"{error:>8}  {figure['us']:8.1f} {figure['tb_s']:6.2f}  {figure['of_copy']:7.0%}  "
                    f"{figure['workspace_mib']:10.2f}"
                )
                figures.append(figure)
    if arguments.write:
        report.write("sampling", {"vocab": VOCAB, "copy_tb_s": copy / 1e12, "figures": figures})


class Choice:
    """The engine's choice of a token a row; the one place that knows how its kernel is called."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._arrivals = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._no_cutoffs = torch.full((num_rows,), float("-inf"), device=device)

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cutoffs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids [R]."""
        cutoffs = self._no_cutoffs if cutoffs is None else cutoffs
        settings = temperature, seeds, positions, slots, 0, logits.shape[1], cutoffs, self._arrivals
        return gumbel_argmax(logits, *settings, as_token_ids=True)


def choose_by_torch(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """The usual way without a synchronisation: probabilities over exponential noise, from torch's generator."""
    probabilities = (logits.float() / temperature[:, None]).softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)


def argmax_by_torch(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Greedy choice."""
    return logits.argmax(-1)


@torch.inference_mode()
def measure_argmax(rows: int) -> Iterator[dict[str, Any]]:
    """Check and time the choice of tokens at so many rows."""
    seeds = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
    positions = torch.randint(0, 32768, (rows,), dtype=torch.int32, device="cuda")
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        nbytes = rows * VOCAB * dtype.itemsize
        sets = [random_logits(rows, 1.0, dtype) for _ in range(gpu_timing.copies_beyond_cache(nbytes))]
        for what, heat, torchs_way in (("greedy", 0.0, argmax_by_torch), ("temperature 1", 1.0, choose_by_torch)):
            temperature = torch.full((rows,), heat, device="cuda")
            for name, kernel in (("torch", torchs_way), ("paceline", Choice(rows, slots.device))):
                error = None
                if kernel is not choose_by_torch:  # which draws other noise, so that there is nothing to compare with
                    chosen = kernel(sets[0], temperature, seeds, positions, slots)
                    error = shortfall(chosen, sets[0], temperature, seeds, positions)
                    gpu_timing.check_error(f"{what} by {name} at {rows} rows", error, MAX_SHORTFALL)
                calls = [partial(kernel, logits, temperature, seeds, positions, slots) for logits in sets]
                yield timed(rows, dtype, what, name, error, nbytes, calls)


@torch.inference_mode()
def measure_filtered(rows: int) -> Iterator[dict[str, Any]]:
    """Check the filters and time the choice of tokens with them, at so many rows of the model's type."""
    dtype = torch.bfloat16
    seeds = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
    positions = torch.randint(0, 32768, (rows,), dtype=torch.int32, device="cuda")
    everyone = torch.arange(rows, device="cuda")
    choice = Choice(rows, everyone.device)

    def by_cutoffs(logits: torch.Tensor, rules: Rules) -> torch.Tensor:
        cutoffs = find_cutoffs(logits, everyone, *rules)
        return choice(logits, rules[0], seeds, positions, everyone, cutoffs)

    def by_sorting(logits: torch.Tensor, rules: Rules) -> torch.Tensor:
        return choose_by_torch(filter_by_sorting(logits.float(), *rules), rules[0], seeds, positions, everyone)

    nbytes = rows * VOCAB * dtype.itemsize
    for spread_name, spread in SPREADS.items():
        sets = [random_logits(rows, spread, dtype) for _ in range(gpu_timing.copies_beyond_cache(nbytes))]
        for rule_name, rule in RULES.items():
            rules = rules_of_rows(rows, *rule)
            kept = {
                "torch, sorted": filter_by_sorting(sets[0].float(), *rules) > float("-inf"),
                "paceline": sets[0] >= find_cutoffs(sets[0], everyone, *rules)[:, None],
            }
            for name, kernel in (("torch, sorted", by_sorting), ("paceline", by_cutoffs)):
                what = f"{rule_name}, {spread_name}"
                error = misplaced_mass(kept[name], sets[0], rules)
                gpu_timing.check_error(f"{what} by {name} at {rows} rows", error, MAX_MASS[name])
                yield timed(rows, dtype, what, name, error, nbytes, [partial(kernel, each, rules) for each in sets])


def timed(
    rows: int,
    dtype: torch.dtype,
    what: str,
    kernel: str,
    error: float | None,
    nbytes: int,
    calls: Sequence[gpu_timing.Call],
) -> dict[str, Any]:
    """Time calls that move at least nbytes each, and name the figures."""
    return {
        "rows": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "what": what,
        "kernel": kernel,
        "error": error,
        "bytes": nbytes,
        "us": gpu_timing.seconds_a_call(calls) * 1e6,
        "workspace_mib": gpu_timing.workspace_bytes(calls[0]) / 2**20,
    }


def random_logits(rows: int, spread: float, dtype: torch.dtype) -> torch.Tensor:
    """[rows, VOCAB] normal values on the GPU."""
    return torch.empty(rows, VOCAB, dtype=dtype, device="cuda").normal_(0.0, spread)


def rules_of_rows(rows: int, top_k: int, top_p: float, min_p: float) -> Rules:
    """The same rules for every row, at temperature 1, on the GPU."""
    return (
        torch.ones(rows, device="cuda"),
        torch.full((rows,), top_k, dtype=torch.int32, device="cuda"),
        torch.full((rows,), top_p, device="cuda"),
        torch.full((rows,), min_p, device="cuda"),
    )


def filter_by_sorting(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Logits with what the rules drop at minus infinity, by a sort of the whole vocabulary; in place."""
    infinity, width = float("inf"), logits.shape[1]
    ordered = logits.sort(dim=-1, descending=True).values
    kth = torch.where((top_k > 0) & (top_k < width), top_k, width).long() - 1
    dropped = ordered < ordered.gather(1, kth[:, None])
    shares = (ordered / temperature[:, None]).masked_fill_(dropped, -infinity).softmax(-1)
    # A token stays where those before it have not reached the share; the first always does.
    dropped |= shares.cumsum(-1) - shares >= top_p[:, None]
    dropped |= shares < min_p[:, None] * shares[:, :1]
    last = (~dropped).sum(-1, keepdim=True).clamp_(min=1) - 1
    # By value: of logits equal to the last that stays, as there are in bfloat16, all stay.
    return logits.masked_fill_(logits < ordered.gather(1, last), -infinity)


def shortfall(
    chosen: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> float:
    """How far the chosen tokens' scores lie below the best ones, at most, by the reference's noise."""
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    scores = logits.float()
    if bool((temperature > 0).any()):
        scores = scores + temperature[:, None] * gumbel_noise(seeds, positions, token_ids)
    return float((scores.amax(-1) - scores.gather(1, chosen[:, None])[:, 0]).max())


def misplaced_mass(kept: torch.Tensor, logits: torch.Tensor, rules: Rules) -> float:
    """The most probability, of a row, on tokens that are kept where the reference drops them, or the reverse.

    Of many rows, CHECKED_ROWS are looked at.
    """
    rows = torch.linspace(0, logits.shape[0] - 1, min(logits.shape[0], CHECKED_ROWS), device=logits.device).long()
    expected = logits[rows] >= find_cutoffs_reference(logits[rows], rows, *rules)[:, None]
    probabilities = (logits[rows].float() / rules[0][rows, None]).softmax(-1)
    return float((probabilities * (kept[rows] != expected)).sum(-1).max())


if __name__ == "__main__":
    main()
