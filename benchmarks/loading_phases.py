"""One rank's process of benchmarks/load_weights.py: it loads, and says what the time went to.

The loader's functions are timed where they are, in the process that loads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from paceline.model import checkpoint_files, decoder, pinned_copies, shard_reader, staging, weights
from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.coverage import Coverage
from paceline.model.mapped_columns import MappedFile
from paceline.model.registry import MODEL_CLASSES


def choose(readers: int, piece_mib: int, spare_buffers: int) -> None:
    """Have this process's loader and plain read use so many threads at most, and pieces and buffers like that."""
    staging.READERS = readers
    staging.SPARE_BUFFERS = spare_buffers
    staging.PIECE_BYTES = shard_reader.PIECE_BYTES = piece_mib << 20


def load_as_rank(
    connection: Connection, folder: str, device_name: str, settings: tuple[int, int, int], rank: int, size: int
) -> None:
    """Say that all is ready, wait for the word, load, say what it took, in JSON, and wait for the word to let go.

    That comes once all ranks have loaded: as in an engine, none holds up another by giving back what it loaded with.
    settings: what `choose` takes.
    """
    choose(*settings)
    number = rank % torch.cuda.device_count() if device_name == "cuda" else None
    device = torch.device(device_name, number)
    torch.zeros(1, device=device)  # the GPU's context is no part of loading
    comm = SingleRank()
    comm.rank, comm.size = rank, size  # loading calls no collective
    config = ModelConfig.from_folder(Path(folder))
    watch, mapped = watch_loading(config), count_mapped_bytes()
    connection.send_bytes(b"ready")
    connection.recv_bytes()
    before, start = counters(), time.perf_counter()
    with staging.StagingMemory(device, size) as memory:
        model = weights.load_model(folder, config, comm, memory, torch.bfloat16, max_model_len=4096)
        loaded = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        end = time.perf_counter()
        after = counters()
        result = {
            "rank": rank,
            "seconds": end - start,
            "bytes": sum(parameter.nbytes for parameter in model.parameters()),
            "read": after["rchar"] - before["rchar"] + sum(mapped),
            "storage": after["read_bytes"] - before["read_bytes"],
            "phases": phases(watch, end - start, end - loaded, memory.readers),
        }
        connection.send_bytes(json.dumps(result).encode())
        connection.recv_bytes()


def counters() -> dict[str, int]:
    """This process's /proc/self/io: rchar is asked of the system, read_bytes came from storage."""
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in lines}


class Stopwatch:
    """Seconds that chosen functions took, by the name of what they do, over all threads."""

    def __init__(self) -> None:
        self._calls: dict[str, list[float]] = {}

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        """From now on time a function's calls."""
        function: Callable[..., Any] = getattr(owner, attribute)
        calls = self._calls.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                calls.append(time.perf_counter() - start)

        setattr(owner, attribute, timed)

    def __getitem__(self, name: str) -> float:
        return sum(self._calls[name])


def watch_loading(config: ModelConfig) -> Stopwatch:
    """Watch the functions that load_model consists of, before it is called; `phases` reads the result."""
    watch = Stopwatch()
    watch.watch("model", MODEL_CLASSES[config.architecture], "__init__")
    watch.watch("rotary table", decoder, "cos_sin_table")
    watch.watch("headers", checkpoint_files.CheckpointFiles, "__init__")
    watch.watch("ledger", weights.Ledger, "__init__")
    watch.watch("ledger", weights.Ledger, "enter")
    watch.watch("parameters", weights, "_materialise")
    watch.watch("driver", weights, "_reserve")
    watch.watch("pinning", staging.StagingMemory, "_allocate")
    watch.watch("ready", weights, "get_ready")
    watch.watch("pieces", shard_reader.ShardReader, "__init__")
    watch.watch("run", shard_reader.ShardReader, "run")
    watch.watch("reading", shard_reader.ShardReader, "_read_in_threads")
    watch.watch("check", shard_reader.ShardReader, "_check")
    watch.watch("read", checkpoint_files.StoredBox, "read_rows")
    watch.watch("start", pinned_copies.PinnedCopies, "start")
    watch.watch("wait", shard_reader._Slot, "wait")
    watch.watch("coverage", Coverage, "faults")
    return watch


def phases(watch: Stopwatch, total: float, last: float, readers: int) -> dict[str, float]:
    """Seconds of each step of load_model, then of what is part of a step or goes on beside it."""
    steps = {
        "model without memory": watch["model"],
        "headers and ledger": watch["headers"] + watch["ledger"],
        "memory for parameters": watch["parameters"],
        "cutting into pieces": watch["pieces"],
        "reading and copying": watch["reading"],
        "last look at values": watch["run"] - watch["reading"],
        "coverage": watch["coverage"],
        "last synchronisation": last,
    }
    steps["everything else"] = total - sum(steps.values())
    return {
        **steps,
        "(beside steps: rotary table": watch["rotary table"],
        "in the memory: the driver": watch["driver"],
        "beside steps: pinning": watch["pinning"],
        "reads, a thread's mean": watch["read"] / readers,
        "getting ready to check": watch["ready"],
        "all starts of copies": watch["start"],
        "all looks at values": watch["check"],
        "waits for buffers, a thread's mean)": watch["wait"] / readers,
    }


def count_mapped_bytes() -> list[int]:
    """Sizes of the parts copied from mapped files, from now on."""
    copy_columns, sizes = MappedFile.copy_columns, []

    def counted(self: MappedFile, first: int, pitch: int, out: Any) -> bool:
        sizes.append(out.nbytes)
        return copy_columns(self, first, pitch, out)

    MappedFile.copy_columns = counted  # type: ignore[method-assign]
    return sizes
