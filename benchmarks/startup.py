"""How long the engine takes from the start of its process to the first token, and what that time goes to.

    ./launch.sh bench startup [--model qwen3-0.6b] [--tokenizer DIR] [--rounds 3] [--write]
    ./launch.sh bench startup --folder DIR --device cpu

Each start is a process of its own that imports paceline, loads the checkpoint from the disk and asks for one token. The
first one finds no compiled kernels and no measured products (`cold`), those after it find what it left (`warm`); the
files are in the system's cache. --model is a checkpoint of random weights in the shape of a public model, written to
the scratch folder first, with the tokenizer of --tokenizer where given: to read a large one takes a second. Parts that
run within others are indented; the tokenizer is read within `kernels` where these are compiled, and else at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOTAL = "first token"
PARTS = {
    "configuration": "_read_config",
    "weights": "_load",
    "kernels": "_choose_kernels",
    "  compiled": "_compile_kernels",
    "warm-up": "_warm_up",
    "cache": "_make_caches",
    "graphs": "_capture_graphs",
}
"""Of making a Worker, by its methods."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a name of benchmarks/models.py")
    parser.add_argument("--folder", type=Path, help="a checkpoint to take instead")
    parser.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer that checkpoint gets")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3, help="warm starts, of which the middle one is given")
    parser.add_argument("--start-here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments = parser.parse_args()
    if arguments.start_here:
        print(json.dumps(start(arguments.folder, arguments.device)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or checkpoint(arguments.model, Path(scratch), arguments.tokenizer)
        caches = {"TRITON_CACHE_DIR": f"{scratch}/triton", "XDG_CACHE_HOME": f"{scratch}/caches"}
        runs = [start_process(folder, arguments.device, caches) for _ in range(1 + arguments.rounds)]
    by_time = sorted(runs[1:], key=lambda run: run[TOTAL])
    warm = by_time[len(by_time) // 2]
    figures = {"cold": runs[0], "warm": warm}
    print(f"{'seconds':16}{'cold':>8}{'warm':>8}")
    for part in runs[0]:
        print(f"{part:16}{runs[0][part]:8.2f}{warm[part]:8.2f}")
    print(f"warm starts took {by_time[0][TOTAL]:.2f} to {by_time[-1][TOTAL]:.2f} s")
    if arguments.write:
        import report

        report.write(
            "startup_with_tokenizer" if arguments.tokenizer else "startup",
            {"model": folder.name, "device": arguments.device, **figures},
        )


def checkpoint(model: str, scratch: Path, tokenizer: Path | None) -> Path:
    """A checkpoint of random weights in the shape of a public model, with a tokenizer where there is one to take."""
    from load_weights import write_checkpoint
    from models import MODELS

    folder = scratch / model
    write_checkpoint(folder, MODELS[model])
    for path in tokenizer.glob("tokenizer*.json") if tokenizer else ():
        shutil.copy(path, folder)
    return folder


def start_process(folder: Path, device: str, caches: dict[str, str]) -> dict[str, float]:
    """What one start took, in a process that finds these caches."""
    command = [sys.executable, __file__, "--start-here", "--folder", str(folder), "--device", device]
    run = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True)
    seconds: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return seconds


def start(folder: Path, device: str) -> dict[str, float]:
    """Start the engine in this process: seconds of each part, and from the process's start to the first token."""
    import torch  # noqa: F401 (its share of the imports)

    torch_imported = seconds_since_start()
    from loading_phases import Stopwatch

    from paceline import LLM, SamplingParams
    from paceline.launcher import engine
    from paceline.worker.worker import Worker

    imported = seconds_since_start()
    watch = Stopwatch()
    for name, method in PARTS.items():
        watch.watch(name, Worker, method)
    watch.watch("  tokenizer", engine, "Tokenizer")
    with LLM(folder, device=device, max_model_len=min(4096, longest(folder))) as llm:
        ready = seconds_since_start()
        llm.generate(
            list(range(10, 26)), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False
        )
        first_token = seconds_since_start()
    parts = {name: watch[name] for name in ("  tokenizer", *PARTS)}
    named = sum(seconds for name, seconds in parts.items() if not name.startswith(" "))
    return {
        "imports": imported,
        "  torch": torch_imported,
        **parts,
        "everything else": ready - imported - named,
        "engine ready": ready,
        TOTAL: first_token,
    }


def longest(folder: Path) -> int:
    """Tokens that the model was made for."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    tokens: int = config.get("max_position_embeddings", 2048)
    return tokens


def seconds_since_start() -> float:
    """Age of this process, its imports included (/proc/self/stat, field 22, in clock ticks after boot)."""
    # The second field, the program's name in parentheses, may itself hold spaces and parentheses.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


if __name__ == "__main__":
    main()
