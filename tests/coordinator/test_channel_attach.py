"""Joining a step channel and leaving it: who is let in, and what remains afterwards."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.coordinator.channel import StepChannelReader, StepChannelWriter
from paceline.coordinator.errors import EngineError, InputError
from paceline.coordinator.messages import StepPlan

PATIENCE = 60.0
"""Seconds after which something that should happen at once counts as not happening."""


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def mapped_files() -> set[str]:
    """Files of /dev/shm that this process has mapped; what others have there comes and goes."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if " /dev/shm/" in line}


def test_closing_leaves_nothing_behind_and_may_be_repeated(threads: ThreadPoolExecutor) -> None:
    gc.collect()  # what other tests left open must not be closed meanwhile
    open_before = set(os.listdir("/proc/self/fd"))
    shared_before = mapped_files()
    writer = StepChannelWriter.create(num_readers=1)
    attaching = threads.submit(StepChannelReader.attach, writer.handle, 0)
    writer.wait_attached()
    reader = attaching.result(PATIENCE)
    assert mapped_files() == shared_before
    with pytest.raises(EngineError, match="refused"):
        StepChannelReader.attach(writer.handle, 0, PATIENCE)
    for _ in range(2):
        writer.close()
        reader.close()
    assert set(os.listdir("/proc/self/fd")) == open_before
    assert writer.handle not in Path("/proc/net/unix").read_text()


def test_ranks_that_do_not_attach_are_named(threads: ThreadPoolExecutor) -> None:
    writer = StepChannelWriter.create(num_readers=3)
    attaching = threads.submit(StepChannelReader.attach, writer.handle, 1)
    with pytest.raises(EngineError, match=r"^ranks 1, 3 did not attach .* within 0\.5 s"):
        writer.wait_attached(timeout=0.5)
    with pytest.raises(EngineError, match="call wait_attached"):
        writer.send(StepPlan(0))
    attaching.result(PATIENCE).close()
    writer.close()


@pytest.mark.parametrize("index", [1, 7])
def test_a_place_that_is_taken_or_does_not_exist_is_refused_on_both_sides(
    threads: ThreadPoolExecutor, index: int
) -> None:
    writer = StepChannelWriter.create(num_readers=2)
    admitted = threads.submit(writer.wait_attached, PATIENCE)
    first = StepChannelReader.attach(writer.handle, 1)
    with pytest.raises(EngineError, match="turned this reader away"):
        StepChannelReader.attach(writer.handle, index)
    with pytest.raises(EngineError, match=f"reader {index}, which is not free"):
        admitted.result(PATIENCE)
    first.close()
    writer.close()


def test_each_side_turns_other_users_away(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StepChannelWriter.create(num_readers=1)
    admitting = threads.submit(writer.wait_attached, PATIENCE)
    monkeypatch.setattr("paceline.coordinator.channel.os.getuid", lambda: os.geteuid() + 1)
    with pytest.raises(EngineError, match="belongs to another user"):
        StepChannelReader.attach(writer.handle, 0, PATIENCE)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(f"\0{writer.handle}")
    assert stranger.recv(1) == b""
    monkeypatch.undo()
    StepChannelReader.attach(writer.handle, 0, PATIENCE).close()
    admitting.result(PATIENCE)
    stranger.close()
    writer.close()


def test_a_handle_that_nobody_answers_is_refused() -> None:
    with pytest.raises(EngineError, match="cannot attach to step channel paceline-steps-none"):
        StepChannelReader.attach("paceline-steps-none", 0)


@pytest.mark.parametrize(("num_readers", "capacity"), [(0, 4096), (1, 0), (1, 4097), (1, -4096)])
def test_sizes_that_make_no_channel_are_refused(num_readers: int, capacity: int) -> None:
    with pytest.raises(InputError):
        StepChannelWriter.create(num_readers, capacity)
