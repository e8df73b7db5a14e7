"""What the time of loading goes to: the loader's functions are timed where they are, in the process that loads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.model import checkpoint_files, decoder, shard_reader, staging, weights
from paceline.model.config import ModelConfig
from paceline.model.coverage import Coverage
from paceline.model.registry import MODEL_CLASSES


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
    watch.watch("pinning", staging.StagingMemory, "_allocate")
    watch.watch("buffers", staging.StagingMemory, "buffers")
    watch.watch("pieces", shard_reader.ShardReader, "__init__")
    watch.watch("run", shard_reader.ShardReader, "run")
    watch.watch("check", shard_reader.ShardReader, "_check")
    watch.watch("start", shard_reader._Buffer, "start")
    watch.watch("read", checkpoint_files.StoredTensor, "read")
    watch.watch("finish", shard_reader._Buffer, "finish")
    watch.watch("coverage", Coverage, "faults")
    return watch


def phases(watch: Stopwatch, total: float, last: float) -> dict[str, float]:
    """Seconds of each step of load_model; those of the threads that read are a thread's mean."""
    steps = {
        "model without memory": watch["model"],
        "headers and ledger": watch["headers"] + watch["ledger"],
        "memory for parameters": watch["parameters"],
        "cutting into pieces": watch["pieces"],
        "reading and copying": watch["run"],
        "coverage": watch["coverage"],
        "last synchronisation": last,
    }
    steps["everything else"] = total - sum(steps.values())
    threads = staging.num_readers()
    return {
        **steps,
        "(in these: rotary table": watch["rotary table"],
        "checks of values": watch["check"],
        "beside these: pinning": watch["pinning"],
        "a thread's waits for pinned memory": watch["buffers"] / threads,
        "its reads": watch["read"] / threads,
        "its launches": (watch["start"] - watch["read"]) / threads,
        "its waits for copies)": watch["finish"] / threads,
    }


def count_mapped_bytes() -> list[int]:
    """Sizes of the parts copied from mapped files, from now on."""
    copy, sizes = checkpoint_files.copy_mapped_columns, []

    def counted(descriptor: int, first: int, pitch: int, out: Any) -> bool:
        sizes.append(out.nbytes)
        return copy(descriptor, first, pitch, out)

    checkpoint_files.copy_mapped_columns = counted
    return sizes
