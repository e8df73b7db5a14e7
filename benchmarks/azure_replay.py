"""A recorded trace replayed against a server of its own, with random weights of a public model's shape.

    ./launch.sh bench azure_replay --trace azure_llm_2023_conv.csv --model qwen3-0.6b [--ranks 2] [--write]

`serve` and `bench serve` run as they do for users, on this machine; requests come at the trace's times for --duration
seconds and get as many tokens as recorded. Options that are not listed here are the server's, as --max-num-seqs 64.

The tokenizer is the default model's, with a word made up for each further id that the model has: time to the first
token is told by the first text, so every token needs one. --model-folder takes a folder made so before, and no network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import report

from paceline.launcher.default_model import default_model_path
from paceline.launcher.termination import ending_in_order

SLOS = ("ttft=500ms", "itl=50ms")
START_SECONDS = 90.0
STOP_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--model", choices=sorted(models.MODELS))
    shape.add_argument("--model-folder", type=Path, help="with a config.json and a tokenizer; its name is the model's")
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="as bench serve takes it")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="S times as many requests a second")
    parser.add_argument("--duration", type=float, default=300.0, metavar="S", help="send for so long (default 300)")
    # Not --tp, which would have launch.sh start so many of this script.
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of the server")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the server's log and metrics, rows and a plot")
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments, server_options = parser.parse_known_args()
    with ending_in_order(), tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model_folder
        if folder is None:
            folder = Path(scratch) / arguments.model
            write_model(arguments.model, folder)
        keep = arguments.keep or Path(scratch)
        keep.mkdir(parents=True, exist_ok=True)
        with running_server(folder, ["--tp", str(arguments.ranks), *server_options], keep / "serve.txt") as url:
            replay = replay_options(arguments.trace, arguments.scale, arguments.duration)
            replayed = replay_trace(url, replay, keep)
        # The rows, one a request, are what --keep is for.
        figures = {name: value for name, value in replayed.items() if name not in ("columns", "rows")}
    if arguments.write:
        name = f"{arguments.trace.stem}_{folder.name}_tp{arguments.ranks}"
        served = {"engine": "paceline", "model": folder.name, "tp": arguments.ranks, "server_options": server_options}
        report.write(name, {**served, **figures})


def write_model(name: str, folder: Path) -> None:
    """Make a folder for a model of that name without weights, to be served with load_format="dummy"."""
    folder.mkdir(parents=True)
    models.write_folder(name, folder)
    config = json.loads((folder / "config.json").read_text())
    # Those of its own tokenizer mean nothing to this one, which has its own.
    del config["bos_token_id"], config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(config["vocab_size"], folder)


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Give a model's folder the default model's tokenizer; ids beyond that one's are words that no text is split into.

    vocab_size: not below the default model's.
    """
    source = default_model_path()
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    # "Ġ" stands for a space. No merge makes these, so encoding a text never does.
    vocabulary |= {f"Ġword{token_id}": token_id for token_id in range(len(vocabulary), vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


@contextmanager
def running_server(folder: Path, options: Sequence[str], log: Path) -> Iterator[str]:
    """A server's URL while it runs; it is then told to end, and RuntimeError is raised where it does not end well."""
    command = [sys.executable, "-m", "paceline.launcher.start", "serve", str(folder), "--load-format", "dummy"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--port", "0", *options], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            spoke, _, _ = select.select([process.stdout], [], [], START_SECONDS)
            line = process.stdout.readline() if spoke else ""
            if not line.startswith("paceline: serving "):
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
            yield line.split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(STOP_SECONDS)
    print(f"server      ended with exit status {status}")
    if status != 0:
        raise RuntimeError(f"the server ended with exit status {status}; --keep keeps its log")


def replay_options(trace: Path, scale: float, duration: float) -> list[str]:
    """The load, and what its answers are to keep to, as options of `bench serve`."""
    load = ["--trace", str(trace), "--scale", str(scale), "--duration", str(duration)]
    return [*load, *(option for slo in SLOS for option in ("--slo", slo))]


def replay_trace(url: str, options: Sequence[str], keep: Path) -> dict[str, Any]:
    """Run `bench serve`, which prints its figures, and return them; keep the server's metrics of after it.

    Raises SystemExit where it fails, as it does where any request does: what it measured is not worth reporting then.
    """
    figures = keep / "bench.json"
    plot = ["--plot", str(keep / "bench.png")] if importlib.util.find_spec("matplotlib") else []
    command = [sys.executable, "-m", "paceline.launcher", "bench", "serve", "--url", url]
    status = subprocess.run([*command, *options, "--json", str(figures), *plot], check=False).returncode
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        (keep / "metrics.txt").write_bytes(answer.read())
    if status != 0:
        raise SystemExit(status)
    found: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
