"""How fast a checkpoint of Qwen3-8B's shape is loaded, beside a plain parallel read of the same files.

    ./launch.sh bench load_weights [--folder DIR] [--device cuda] [--write]

Writes the checkpoint to --folder first (16.4 GB, kept for the next run), which must be on a local disk. The plain read
has as many threads as the loader and reads pieces of the same size into memory that it throws away. `cold` is after the
system was asked to forget the files (the storage column says how much then came from the disk), `warm` after they were
read once. Each rank is a process of its own, on a GPU of its own where there are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
import torch

from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.ledger import get_parameter, tensor_targets
from paceline.model.registry import MODEL_CLASSES
from paceline.model.shard_reader import PIECE_BYTES, READERS
from paceline.model.weights import load_model

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
FILE_BYTES = 4 << 30
BLOCK_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/paceline-qwen3-8b"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="fewer make a smaller model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    parser.add_argument("--rank", type=int, nargs=2, metavar=("RANK", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        load_as_rank(arguments.folder, arguments.device, *arguments.rank)
        return
    if int(os.environ.get("RANK", "0")) > 0:
        return  # this benchmark starts its ranks itself
    folder = arguments.folder / f"{arguments.layers}-layers"
    write_checkpoint(folder, {**CONFIG, "num_hidden_layers": arguments.layers})
    files = sorted(folder.glob("*.safetensors"))
    figures = [figure for cold in (True, False) for figure in measure(folder, files, cold, arguments)]
    if arguments.write:
        report.write("load_weights", {"device": arguments.device, "layers": arguments.layers, "figures": figures})


def measure(folder: Path, files: list[Path], cold: bool, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Print and give the plain read, then the loading at each number of ranks; the median of the rounds."""
    cache = "cold" if cold else "warm"
    plain = statistics.median(plain_read(files, cold) for _ in range(arguments.rounds))
    size = sum(path.stat().st_size for path in files)
    print(
        f"{cache}: plain read with {READERS} threads  {size / 1e9:.2f} GB  {plain:.2f} s  {size / plain / 1e9:.2f} GB/s"
    )
    yield {"cache": cache, "ranks": 0, "bytes": size, "seconds": plain}
    for ranks in arguments.ranks:
        rounds = [run_ranks(folder, files, cold, arguments.device, ranks) for _ in range(arguments.rounds)]
        slowest = [max(results, key=lambda result: result["seconds"]) for results in rounds]
        middle = sorted(slowest, key=lambda result: result["seconds"])[len(slowest) // 2]
        rate = middle["bytes"] / middle["seconds"]
        print(
            f"{cache}: {ranks} rank{'s' if ranks > 1 else ''}, the slowest  {middle['bytes'] / 1e9:.2f} GB  "
            f"{middle['seconds']:.2f} s  {rate / 1e9:.2f} GB/s  {rate * plain / size:.0%} of the plain read, "
            f"{middle['read'] / middle['bytes']:.3f} bytes read for each of the shard, "
            f"{middle['storage'] / 1e9:.2f} GB from storage"
        )
        yield {"cache": cache, "ranks": ranks, **middle, "share_of_plain_read": rate * plain / size}


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """A checkpoint of random finite bfloat16 values in files of FILE_BYTES, unless it is there."""
    if (folder / "complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    parsed = ModelConfig.from_folder(folder)
    model = MODEL_CLASSES[parsed.architecture](parsed, SingleRank(), torch.bfloat16, 1)
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for name, (parameter_name, shard_id) in tensor_targets(model).items():
        shards = get_parameter(model, parameter_name).shards
        if shard_id in shards:
            shapes.append((name, shards[shard_id].full_shape))
    block = (0.02 * torch.randn(BLOCK_BYTES // 2)).to(torch.bfloat16).view(torch.uint8).numpy().data
    number, waiting, end = 0, {}, 0
    for name, shape in shapes:
        size = 2 * torch.Size(shape).numel()
        if end and end + size > FILE_BYTES:
            write_file(folder / f"model-{number:05}.safetensors", waiting, end, block)
            number, waiting, end = number + 1, {}, 0
        waiting[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    write_file(folder / f"model-{number:05}.safetensors", waiting, end, block)
    (folder / "complete").touch()


def write_file(path: Path, header: dict[str, Any], size: int, block: memoryview) -> None:
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, size, BLOCK_BYTES):
            file.write(block[: min(BLOCK_BYTES, size - start)])
        file.flush()
        os.fsync(file.fileno())


def prepare_cache(files: list[Path], cold: bool) -> None:
    """Have the system forget the files, or know them."""
    for path in files:
        with path.open("rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(PIECE_BYTES):
                    pass


def plain_read(files: list[Path], cold: bool) -> float:
    """Seconds to read all files once, in pieces that threads take in turn."""
    prepare_cache(files, cold)
    pieces = iter([(path, start) for path in files for start in range(0, path.stat().st_size, PIECE_BYTES)])
    descriptors = {path: os.open(path, os.O_RDONLY) for path in files}
    lock = threading.Lock()

    def work() -> None:
        buffer = torch.zeros(PIECE_BYTES, dtype=torch.uint8).numpy().data
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            os.preadv(descriptors[piece[0]], [buffer], piece[1])

    threads = [threading.Thread(target=work) for _ in range(READERS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    for descriptor in descriptors.values():
        os.close(descriptor)
    return seconds


def run_ranks(folder: Path, files: list[Path], cold: bool, device: str, size: int) -> list[dict[str, Any]]:
    """Load in so many processes at once, which begin together; what each says of itself."""
    command = [sys.executable, __file__, "--folder", str(folder), "--device", device, "--rank"]
    processes = [
        subprocess.Popen([*command, str(rank), str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    for process in processes:
        process.stdout.readline()  # it is ready
    prepare_cache(files, cold)
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return [json.loads(process.communicate()[0]) for process in processes]


def load_as_rank(folder: Path, device_name: str, rank: int, size: int) -> None:
    """One rank's process: wait for the word, load, and print what it took."""
    device = (
        torch.device(device_name, rank % torch.cuda.device_count()) if device_name == "cuda" else torch.device("cpu")
    )
    torch.zeros(1, device=device)  # the GPU's context is no part of loading
    comm = SingleRank()
    comm.rank, comm.size = rank, size  # loading calls no collective
    config = ModelConfig.from_folder(folder)
    print("ready", flush=True)
    sys.stdin.readline()
    before, start = counters(), time.perf_counter()
    model = load_model(folder, config, comm, device, torch.bfloat16, max_model_len=4096)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    after = counters()
    result = {
        "rank": rank,
        "seconds": seconds,
        "bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "read": after["rchar"] - before["rchar"],
        "storage": after["read_bytes"] - before["read_bytes"],
    }
    print(json.dumps(result))


def counters() -> dict[str, int]:
    """This process's /proc/self/io: rchar is asked of the system, read_bytes came from storage."""
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in lines}


if __name__ == "__main__":
    main()
