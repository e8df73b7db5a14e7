"""The engine on the workloads of workloads.py, with random weights of a public model's shape.

    ./launch.sh bench throughput --model qwen3-0.6b [--tp 2] [--only W2,W4] [--write]

Every request ends at its own number of tokens (ignore_eos). benchmarks/peers has what other engines do with the same
requests; `./launch.sh bench compare` sets them side by side.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import report
import torch
import workloads
from startup import seconds_since_start

from paceline import LLM, SamplingParams
from paceline.coordinator.config import EngineConfig

DEFAULT_MODEL_LEN = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--model", choices=sorted(models.MODELS))
    shape.add_argument("--model-folder", type=Path, help="a folder with a config.json; its name is the model's")
    parser.add_argument("--only", default=",".join(workloads.NAMES), help="workloads to run, separated by commas")
    parser.add_argument("--quick", action="store_true", help="few, short requests, to see that it runs")
    parser.add_argument("--tp", type=int, help="ranks, which launch.sh starts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=EngineConfig.max_num_seqs)
    parser.add_argument("--max-model-len", type=int, default=DEFAULT_MODEL_LEN)
    parser.add_argument("--max-batched-tokens", type=int, default=EngineConfig.max_batched_tokens)
    parser.add_argument("--cache-memory-share", type=float)
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if unknown := set(only) - set(workloads.NAMES):
        parser.error(f"--only {', '.join(sorted(unknown))}: there are {', '.join(workloads.NAMES)}")
    sizes = workloads.QUICK if arguments.quick else workloads.Sizes()
    if arguments.max_model_len < sizes.longest_request:
        parser.error(f"--max-model-len must be at least {sizes.longest_request} for these workloads")

    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model_folder
        if folder is None:
            folder = Path(scratch)
            models.write_folder(arguments.model, folder)
        choice = {"temperature": arguments.temperature, "top_k": arguments.top_k, "top_p": arguments.top_p}
        settings = {
            "max_num_seqs": arguments.max_num_seqs,
            "max_model_len": arguments.max_model_len,
            "max_batched_tokens": arguments.max_batched_tokens,
            "cache_memory_share": arguments.cache_memory_share,
        }
        # Only rank 0 goes on after this; the others leave the script when its engine is closed.
        with LLM(
            folder, tensor_parallel_size=arguments.tp, load_format="dummy", device=arguments.device, **settings
        ) as llm:
            figures = {
                "engine": "paceline",
                "model": arguments.model or folder.name,
                "tp": llm.engine.config.tensor_parallel_size,
                "workloads": only,
                **choice,
                **settings,
                **measure(llm, only, sizes, choice),
            }
    for name, value in figures.items():
        print(f"{name:24}  {value:.3f}" if isinstance(value, float) else f"{name:24}  {value}")
    if arguments.write:
        report.write(f"throughput_{figures['model']}_tp{figures['tp']}", figures)


def measure(llm: LLM, only: Sequence[str], sizes: workloads.Sizes, choice: dict[str, Any]) -> dict[str, Any]:
    """The workloads' figures, what the start took, and the memory of rank 0; choice: how tokens are chosen."""
    ready = seconds_since_start()
    llm.generate(list(range(10, 26)), SamplingParams(**choice, max_tokens=1, ignore_eos=True))
    first_token = seconds_since_start()

    def generate(requests: Sequence[workloads.Request]) -> None:
        params = [SamplingParams(**choice, max_tokens=count, ignore_eos=True) for _, count in requests]
        outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        for output, (_, count) in zip(outputs, requests, strict=True):
            made = len(output.outputs[0].token_ids)
            if made != count:
                raise RuntimeError(f"a request for {count} tokens got {made}; the figures would be wrong")

    figures = workloads.run_workloads(generate, llm.engine.limits.vocab_size, only, sizes)
    return {
        **figures,
        "start_s": ready,
        "first_token_s": first_token,
        "cache_blocks": llm.engine.limits.num_blocks,
        "preemptions": llm.engine.coordinator.stats().preemptions,
        **memory(llm.engine.device),
    }


def memory(device: torch.device) -> dict[str, Any]:
    """GPU memory of this rank: the peak of what tensors took, and what is taken on the GPU now, of all there is."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    gib = 1 << 30
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / gib,
        "gpu_taken_gib": (total - free) / gib,
        "gpu_memory_gib": total / gib,
        "gpu_taken_share": (total - free) / total,
    }


if __name__ == "__main__":
    main()
