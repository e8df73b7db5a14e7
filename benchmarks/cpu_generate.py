"""Generation on the CPU beside transformers' generate, in one run on the default model, and what a prefix hit saves.

    ./launch.sh bench cpu_generate [--dtype float32] [--write]

Both get the same random prompts and make the same number of tokens; each figure is the median of several rounds in
which the two take turns, so that a slow spell of the machine meets both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import report
import torch
from transformers import AutoModelForCausalLM

from paceline import LLM, SamplingParams
from paceline.launcher.checkpoint_source import resolve_checkpoint

PROMPT_TOKENS = 128
NEW_TOKENS = 64
BATCHES = (1, 4, 8)
PREFIX_TOKENS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments = parser.parse_args()
    folder = resolve_checkpoint(None)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.dtype)).eval()
    torch.manual_seed(0)
    figures: dict[str, Any] = {"dtype": arguments.dtype, "threads": torch.get_num_threads(), "generate": []}
    with LLM(str(folder), dtype=arguments.dtype, device="cpu") as llm:
        print(f"{arguments.dtype}, {PROMPT_TOKENS} prompt tokens, {NEW_TOKENS} new ones, seconds (median)")
        print("requests  transformers  paceline  ratio  paceline tok/s")
        for batch in BATCHES:
            ours, theirs = compare(llm, reference, batch, arguments.rounds)
            rate = batch * NEW_TOKENS / ours
            print(f"{batch:8}  {theirs:12.2f}  {ours:8.2f}  {theirs / ours:5.2f}  {rate:14.1f}")
            figures["generate"].append(
                {"requests": batch, "transformers_s": theirs, "paceline_s": ours, "ratio": theirs / ours}
            )
        cold, warm, cached = prefix_hit(llm, arguments.rounds)
        print(f"first token after {PREFIX_TOKENS} tokens: {cold:.3f} s; with {cached} of them cached: {warm:.3f} s")
        figures["prefix_hit"] = {"cold_s": cold, "warm_s": warm, "cached_tokens": cached}
    if arguments.write:
        report.write(f"cpu_generate_{arguments.dtype}", figures)


def compare(llm: LLM, reference: Any, batch: int, rounds: int) -> tuple[float, float]:
    """Median seconds of paceline and of transformers for one batch of new random prompts a round."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    ours, theirs = [], []
    for number in range(rounds + 1):
        prompts = torch.randint(10, 49000, (batch, PROMPT_TOKENS))
        mine = timed(lambda p=prompts: llm.generate(p.tolist(), params))
        peer = timed(
            lambda p=prompts: reference.generate(
                p,
                attention_mask=torch.ones_like(p),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=2,
            )
        )
        if number > 0:  # the first round warms both up
            ours.append(mine)
            theirs.append(peer)
    return statistics.median(ours), statistics.median(theirs)


def prefix_hit(llm: LLM, rounds: int) -> tuple[float, float, int]:
    """Median seconds to the first token of a long prompt, new and repeated, and the tokens that the repeat skipped."""
    params = SamplingParams(temperature=0, max_tokens=1)
    cold, warm, cached = [], [], 0
    for _ in range(rounds):
        prompt = torch.randint(10, 49000, (PREFIX_TOKENS,)).tolist()
        cold.append(timed(lambda p=prompt: llm.generate(p, params)))
        warm.append(timed(lambda p=prompt: llm.generate(p, params)))
        cached = llm.generate(prompt, params)[0].cached_tokens
    return statistics.median(cold), statistics.median(warm), cached


def timed(work: Callable[[], Any]) -> float:
    """Seconds that work takes; used only on the CPU, where nothing is left running after it."""
    start = time.perf_counter()
    with torch.inference_mode():
        work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
