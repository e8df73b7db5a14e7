"""How fast a checkpoint of Qwen3-8B's shape is loaded, beside a plain parallel read of the same files.

    ./launch.sh bench load_weights [--folder DIR] [--device cuda] [--warm-only] [--write]
    ./launch.sh bench load_weights --warm-only --ranks 1 --piece-mib 2 4 8 --readers 8 12    # which are best here

Writes the checkpoint to --folder first (16.4 GB, kept for the next run), which must be on a local disk. The plain read
has as many threads as the loader and reads pieces of the same size into memory that it throws away; what the bus to one
GPU takes for the same bytes stands beside it, since no load is faster than the slower of both. `cold` is after the
system was asked to forget the files (the storage column says how much then came from the disk), `warm` after they were
read once. Each rank is a process of its own, on a GPU of its own where there are enough, and keeps what it loaded with
until all have loaded, as an engine's ranks do. Several sizes and numbers of threads stand at the end once more, the
fastest first.

Below a warm load stands what its time went to. What was read counts both what the rank asked of the system (rchar) and
what it copied from mapped files.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import report
import torch
from loading_phases import choose, load_as_rank

from paceline.model import staging
from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.ledger import get_parameter, tensor_targets
from paceline.model.registry import MODEL_CLASSES
from paceline.model.staging import num_readers

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
    parser.add_argument("--warm-only", action="store_true", help="leave out reading from the disk")
    parser.add_argument(
        "--readers", type=int, nargs="+", default=[staging.READERS], help="at most so many threads a rank"
    )
    parser.add_argument("--piece-mib", type=int, nargs="+", default=[staging.PIECE_BYTES >> 20], help="of each read")
    parser.add_argument(
        "--spare-buffers", type=int, nargs="+", default=[staging.SPARE_BUFFERS], help="beyond one a thread"
    )
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments = parser.parse_args()
    if int(os.environ.get("RANK", "0")) > 0:
        return  # this benchmark starts its ranks itself
    folder = arguments.folder / f"{arguments.layers}-layers"
    write_checkpoint(folder, {**CONFIG, "num_hidden_layers": arguments.layers})
    files = sorted(folder.glob("*.safetensors"))
    caches = (False,) if arguments.warm_only else (True, False)
    figures = []
    swept = (arguments.piece_mib, arguments.readers, arguments.spare_buffers)
    for cold, piece_mib, readers, spare in product(caches, *swept):
        choose(readers, piece_mib, spare)
        settings = {"cache": "cold" if cold else "warm", "threads": num_readers(1)}
        settings |= {"piece_mib": piece_mib, "spare_buffers": spare}
        figures += [{**settings, **figure} for figure in measure(folder, files, cold, arguments)]
    if any(len(values) > 1 for values in swept):
        print_fastest_first(figures)
    if arguments.write:
        report.write("load_weights", {"device": arguments.device, "layers": arguments.layers, "figures": figures})


def measure(folder: Path, files: list[Path], cold: bool, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Print and give the plain read, then the loading at each number of ranks; the median of the rounds."""
    cache = "cold" if cold else "warm"
    if not cold:
        plain_read(files)
    plain = statistics.median(timed_plain_read(files, cold) for _ in range(arguments.rounds))
    size = sum(path.stat().st_size for path in files)
    print(
        f"{cache}: plain read with {num_readers(1)} threads and pieces of {staging.PIECE_BYTES >> 20} MiB  "
        f"{size / 1e9:.2f} GB  {plain:.2f} s  "
        f"{size / plain / 1e9:.2f} GB/s"
    )
    figure = {"ranks": 0, "bytes": size, "seconds": plain}
    if arguments.device == "cuda":
        figure["bus_seconds"] = copy_alone(size)
        print(f"copies to one GPU alone  {figure['bus_seconds']:.2f} s  {size / figure['bus_seconds'] / 1e9:.2f} GB/s")
    yield figure
    for ranks in arguments.ranks:
        slowest = [max(results, key=_seconds) for results in run_rounds(folder, files, cold, ranks, arguments)]
        middle = sorted(slowest, key=_seconds)[len(slowest) // 2]
        rate = middle["bytes"] / middle["seconds"]
        print(
            f"{cache}: {ranks} rank{'s' if ranks > 1 else ''}, the slowest  {middle['bytes'] / 1e9:.2f} GB  "
            f"{middle['seconds']:.2f} s  {rate / 1e9:.2f} GB/s  {rate * plain / size:.0%} of the plain read, "
            f"{middle['read'] / middle['bytes']:.3f} bytes read for each of the shard, "
            f"{middle['storage'] / 1e9:.2f} GB from storage"
        )
        if not cold:
            print("    " + ", ".join(f"{phase} {1000 * part:.0f} ms" for phase, part in middle["phases"].items()))
        yield {"ranks": ranks, "threads": num_readers(ranks), **middle, "share_of_plain_read": rate * plain / size}


def print_fastest_first(figures: list[dict[str, Any]]) -> None:
    for figure in sorted(figures, key=lambda figure: (figure["cache"], figure["ranks"], figure["seconds"])):
        if figure["ranks"]:
            print(
                f"{figure['cache']}, ranks {figure['ranks']}, threads {figure['threads']:2}, "
                f"{figure['spare_buffers']:2} spare buffers, pieces of {figure['piece_mib']:2} MiB: "
                f"{figure['seconds']:.3f} s, {figure['share_of_plain_read']:.0%} of the plain read"
            )


def _seconds(result: dict[str, Any]) -> float:
    seconds: float = result["seconds"]
    return seconds


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


def forget(files: list[Path]) -> None:
    """Ask the system to drop the files from its cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not on the disk yet stays
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed_plain_read(files: list[Path], cold: bool) -> float:
    if cold:
        forget(files)
    return plain_read(files)


def plain_read(files: list[Path]) -> float:
    """Seconds to read all files once, in pieces that threads take in turn."""
    pieces = iter([(path, start) for path in files for start in range(0, path.stat().st_size, staging.PIECE_BYTES)])
    descriptors = {path: os.open(path, os.O_RDONLY) for path in files}
    lock = threading.Lock()

    def work() -> None:
        buffer = torch.zeros(staging.PIECE_BYTES, dtype=torch.uint8).numpy().data
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            os.preadv(descriptors[piece[0]], [buffer], piece[1])

    threads = [threading.Thread(target=work) for _ in range(num_readers(1))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    for descriptor in descriptors.values():
        os.close(descriptor)
    return seconds


def copy_alone(size: int) -> float:
    """Seconds to copy so many bytes to a GPU from pinned buffers that take turns, as the loader's do."""
    pieces = [torch.zeros(staging.PIECE_BYTES, dtype=torch.uint8).pin_memory() for _ in range(staging.READERS)]
    target = torch.empty(staging.PIECE_BYTES, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(pieces[0])
    begin.record()
    for number in range(size // staging.PIECE_BYTES):
        target.copy_(pieces[number % len(pieces)], non_blocking=True)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def run_rounds(
    folder: Path, files: list[Path], cold: bool, size: int, arguments: argparse.Namespace
) -> Iterator[list[dict[str, Any]]]:
    """For each round, load in so many processes at once, which begin together; what each says of itself.

    The processes of all rounds are started first, since that takes longer than to load; then each waits for its round.
    They come from a server that has imported everything, which takes longest.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the server
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["__main__", "loading_phases"])
    settings = (staging.READERS, staging.PIECE_BYTES >> 20, staging.SPARE_BUFFERS)

    def start(rank: int) -> tuple[BaseProcess, Connection]:
        ours, theirs = server.Pipe()
        work = (theirs, str(folder), arguments.device, settings, rank, size)
        process = server.Process(target=load_as_rank, args=work)
        process.start()
        theirs.close()
        return process, ours

    rounds = [[start(rank) for rank in range(size)] for _ in range(arguments.rounds)]
    for _, connection in (rank for ranks in rounds for rank in ranks):
        connection.recv_bytes()  # it is ready
    for ranks in rounds:
        if cold:
            forget(files)
        for _, connection in ranks:
            connection.send_bytes(b"begin")
        results = [json.loads(connection.recv_bytes()) for _, connection in ranks]
        for _, connection in ranks:
            connection.send_bytes(b"end")
        for process, _ in ranks:
            process.join()  # the next round begins with the memory free
        yield results


if __name__ == "__main__":
    main()
