"""Buffers for pieces: apart from each other, fit for any type, and as large as a piece of unusual size needs; readers
that are there as long, and end however the reading ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.model import shard_reader, staging
from paceline.model.checkpoint_files import StoredBox
from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.shard_reader import ShardReader
from paceline.model.staging import PIECE_BYTES, SPARE_BUFFERS, StagingMemory, num_readers
from paceline.model.weights import load_model

CPU = torch.device("cpu")
ENDLESS_S = 60


@pytest.mark.parametrize("size", [10, 1 << 12, PIECE_BYTES, PIECE_BYTES + 2])
def test_buffers_do_not_overlap_and_hold_any_type(size: int, eight_processors: None) -> None:
    with StagingMemory(CPU, 2) as memory:
        buffers = [buffer.result() for buffer in memory.buffers(size)]
    assert len(buffers) == 4 + SPARE_BUFFERS
    for number, buffer in enumerate(buffers):
        assert len(buffer) >= size
        buffer[:8].view(torch.float64).fill_(number)
        buffer[8:size].fill_(number)
    for number, buffer in enumerate(buffers):
        assert buffer[:8].view(torch.float64).item() == number
        assert buffer[8:size].eq(number).all()


@pytest.fixture
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(("ranks", "readers"), [(1, 12), (2, 12), (4, 8), (64, 1)])
def test_ranks_share_the_processors(ranks: int, readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.os, "sched_getaffinity", lambda _: set(range(32)))
    assert num_readers(ranks) == readers


def readers() -> list[threading.Thread]:
    """Those of all staging memories of this process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-weights")]


def test_readers_work_at_the_same_time_and_are_there_until_the_context_ends(eight_processors: None) -> None:
    with StagingMemory(CPU, 2) as memory:
        meeting = threading.Barrier(memory.readers)
        for reader in memory.read(lambda: meeting.wait(ENDLESS_S) and None):
            reader.result()
        assert len(readers()) == memory.readers == 4
    assert readers() == []


def test_a_load_leaves_its_readers_and_buffers_to_the_context(tiny: Callable[..., Any]) -> None:
    folder = tiny("llama").folder
    with StagingMemory(CPU, 1) as memory:
        load_model(folder, ModelConfig.from_folder(folder), SingleRank(), memory, torch.float32, max_model_len=64)
        assert readers()
        assert memory.buffers(PIECE_BYTES)
    assert readers() == memory.buffers(PIECE_BYTES) == []


class Reads:
    """Reads of pieces that all last until something happens, and a little longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way: list[StoredBox] = []
        self.happened = threading.Event()
        read_rows = StoredBox.read_rows

        def slowly(box: StoredBox, start: int, memory: npt.NDArray[np.uint8]) -> None:
            self.under_way.append(box)
            assert self.happened.wait(ENDLESS_S)
            time.sleep(0.1)
            read_rows(box, start, memory)
            self.under_way.remove(box)

        monkeypatch.setattr(StoredBox, "read_rows", slowly)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def interrupt_while_it_waits(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: ShardReader) -> None:
        reads.happened.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(shard_reader, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(ShardReader, "_check", interrupt)


def interrupt_while_readers_begin(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = ThreadPoolExecutor.submit

    def interrupted(pool: ThreadPoolExecutor, work: Callable[[], Any], *arguments: Any) -> Future[Any]:
        future = submit(pool, work, *arguments)
        if len(readers()) == 3 and not reads.happened.is_set():
            reads.happened.set()
            raise KeyboardInterrupt
        return future

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)


@pytest.mark.parametrize("interrupt", [interrupt_while_it_waits, interrupt_while_readers_begin])
def test_no_reader_is_at_work_once_the_caller_was_interrupted(
    interrupt: Callable[[Reads, pytest.MonkeyPatch], None],
    reads: Reads,
    eight_processors: None,
    tiny: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller closes the files that they read."""
    folder = tiny("llama").folder
    config = ModelConfig.from_folder(folder)
    interrupt(reads, monkeypatch)
    with StagingMemory(CPU, 1) as memory:
        with pytest.raises(KeyboardInterrupt):
            load_model(folder, config, SingleRank(), memory, torch.float32, max_model_len=64)
        assert reads.under_way == []
    assert readers() == []


def test_a_readers_unexpected_error_is_the_callers_and_ends_the_others(
    eight_processors: None, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("llama").folder
    config = ModelConfig.from_folder(folder)
    read_rows, run = StoredBox.read_rows, ShardReader.run
    runs: list[ShardReader] = []
    begun: list[StoredBox] = []
    all_have_begun = threading.Barrier(8)

    def noted(reader: ShardReader) -> list[str]:
        runs.append(reader)
        return run(reader)

    def fail_once(box: StoredBox, start: int, memory: npt.NDArray[np.uint8]) -> None:
        begun.append(box)
        if all_have_begun.wait(ENDLESS_S) == 0:
            raise RuntimeError("a reader's own fault")
        deadline = time.monotonic() + ENDLESS_S
        while not runs[0]._abandoned and time.monotonic() < deadline:
            time.sleep(0.001)
        read_rows(box, start, memory)

    monkeypatch.setattr(ShardReader, "run", noted)
    monkeypatch.setattr(StoredBox, "read_rows", fail_once)
    with StagingMemory(CPU, 1) as memory:
        with pytest.raises(RuntimeError, match="a reader's own fault"):
            load_model(folder, config, SingleRank(), memory, torch.float32, max_model_len=64)
        assert len(begun) == 8
    assert readers() == []


@pytest.mark.gpu
def test_buffers_for_a_gpu_are_pinned_as_long_as_they_are_used() -> None:
    with StagingMemory(torch.device("cuda"), 1) as memory:
        buffers = [buffer.result() for size in (PIECE_BYTES, PIECE_BYTES + 2) for buffer in memory.buffers(size)]
        assert all(buffer.is_pinned() for buffer in buffers)
    memory._pinning.shutdown()
    assert not any(buffer.is_pinned() for buffer in buffers)
