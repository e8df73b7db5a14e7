"""The step channel between real processes (and, where no process has to die, between threads of this one)."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.coordinator import channel as channel_module
from paceline.coordinator.channel import StepChannelReader, StepChannelWriter
from paceline.coordinator.errors import EngineError
from paceline.coordinator.messages import Shutdown, StepPlan
from paceline.coordinator.ring import Ring

SMALL_RING = 4096
PATIENCE = 60.0
"""Seconds after which something that should happen at once counts as not happening."""

# A reader that checks that plan number n frees the slots range(n % modulus), and says how many plans it saw.
CHECKING_READER = """
import sys
from paceline.coordinator.channel import StepChannelReader
from paceline.coordinator.messages import Shutdown
reader = StepChannelReader.attach(sys.argv[1], int(sys.argv[2]))
seen = 0
while not isinstance(plan := reader.receive(), Shutdown):
    if plan.step != seen or list(plan.freed) != list(range(seen % int(sys.argv[3]))):
        sys.exit(f"got plan {plan.step} as number {seen}")
    reader.acknowledge(plan.step)
    seen += 1
print(seen, plan.error)
"""
IDLE_READER = """
import sys, time
from paceline.coordinator.channel import StepChannelReader
reader = StepChannelReader.attach(sys.argv[1], int(sys.argv[2]))
time.sleep(600)
"""
FAILING_READER = """
import sys
from paceline.coordinator.channel import StepChannelReader
reader = StepChannelReader.attach(sys.argv[1], int(sys.argv[2]))
reader.report_error("no memory left for layer 3")
"""
WRITER = """
import sys, time
from paceline.coordinator.channel import StepChannelWriter
from paceline.coordinator.messages import StepPlan
writer = StepChannelWriter.create(num_readers=1)
print(writer.handle, flush=True)
writer.wait_attached()
writer.send(StepPlan(0))
print("sent", flush=True)
time.sleep(600)
"""

Start = Callable[..., "subprocess.Popen[str]"]
Connect = Callable[..., tuple[StepChannelWriter, list[StepChannelReader]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a script as a process of its own; killed at the end of the test."""
    with ExitStack() as stack:

        def start_script(script: str, *arguments: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", script, *map(str, arguments)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        yield start_script


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes a channel whose readers are in this process."""
    with ExitStack() as stack, ThreadPoolExecutor() as threads:

        def make(num_readers: int, capacity: int = SMALL_RING) -> tuple[StepChannelWriter, list[StepChannelReader]]:
            writer = StepChannelWriter.create(num_readers, capacity)
            stack.callback(writer.close)
            joining = [threads.submit(StepChannelReader.attach, writer.handle, i) for i in range(num_readers)]
            writer.wait_attached(PATIENCE)
            readers = [future.result(PATIENCE) for future in joining]
            for reader in readers:
                stack.callback(reader.close)
            return writer, readers

        yield make


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def writer_to(start: Start) -> Iterator[Callable[..., tuple[StepChannelWriter, list[subprocess.Popen[str]]]]]:
    """Makes a channel to processes that run the given scripts."""
    with ExitStack() as stack:

        def make(
            *scripts: str, arguments: tuple[object, ...] = ()
        ) -> tuple[StepChannelWriter, list[subprocess.Popen[str]]]:
            writer = StepChannelWriter.create(len(scripts), SMALL_RING)
            stack.callback(writer.close)
            processes = [start(script, writer.handle, index, *arguments) for index, script in enumerate(scripts)]
            writer.wait_attached(PATIENCE)
            return writer, processes

        yield make


ToProcesses = Callable[..., tuple[StepChannelWriter, list["subprocess.Popen[str]"]]]


@pytest.mark.parametrize("num_readers", [1, 2, 3])
def test_every_reader_gets_every_message_in_order_through_a_ring_much_smaller_than_all(
    writer_to: ToProcesses, num_readers: int
) -> None:
    modulus = 101
    writer, processes = writer_to(*[CHECKING_READER] * num_readers, arguments=(modulus,))
    for step in range(4000):
        writer.send(StepPlan(step, freed=range(step % modulus)), PATIENCE)
    writer.wait_acknowledged(3999, PATIENCE)
    writer.send(Shutdown("as planned"), PATIENCE)
    for process in processes:
        assert process.communicate(timeout=PATIENCE)[0] == "4000 as planned\n"


def test_a_message_many_times_the_ring_arrives_whole(writer_to: ToProcesses) -> None:
    writer, processes = writer_to(CHECKING_READER, CHECKING_READER, arguments=(1,))
    writer.send(StepPlan(0), PATIENCE)
    writer.send(Shutdown("x" * 300_000), PATIENCE)
    for process in processes:
        assert process.communicate(timeout=PATIENCE)[0] == f"1 {'x' * 300_000}\n"


def test_a_reader_that_loses_patience_in_the_middle_of_a_message_gets_the_rest_later(
    connect: Connect, threads: ThreadPoolExecutor
) -> None:
    writer, [reader] = connect(1)
    plan = StepPlan(5, freed=range(20_000))
    sending = threads.submit(writer.send, plan, PATIENCE)
    refusals = 0
    while (message := reader.receive(timeout=0)) is None:
        refusals += 1
    sending.result(PATIENCE)
    assert refusals > 0
    assert isinstance(message, StepPlan)
    assert list(message.freed) == list(plan.freed)


def test_receive_without_a_message_returns_none_and_a_sleeping_reader_is_woken(
    connect: Connect, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "HEARTBEAT_SECONDS", 10 * PATIENCE)  # no other reason to wake up
    writer, [reader] = connect(1)
    assert reader.receive(timeout=0) is None
    assert reader.receive(timeout=0.01) is None
    for step in range(5):
        receiving = threads.submit(reader.receive)
        time.sleep(0.02)  # long enough for it to have gone to sleep; either way it must get the message
        writer.send(StepPlan(step))
        assert receiving.result(PATIENCE) == StepPlan(step)


def test_waiting_takes_no_processor_time_on_either_side(connect: Connect) -> None:
    writer, [reader] = connect(1)
    for step in range(3):
        writer.send(StepPlan(step))
        reader.receive()
    start = time.thread_time()
    assert reader.receive(timeout=0.7) is None
    with pytest.raises(EngineError, match="did not carry out step 0"):
        writer.wait_acknowledged(0, timeout=0.7)
    assert time.thread_time() - start < 0.05


def test_a_full_ring_blocks_the_writer_until_the_slowest_reader_makes_room(
    connect: Connect, threads: ThreadPoolExecutor
) -> None:
    writer, [quick, slow] = connect(2)
    receiving = threads.submit(lambda: [quick.receive(PATIENCE) for _ in range(1000)])
    sending = threads.submit(lambda: [writer.send(StepPlan(step), PATIENCE) for step in range(1000)])
    received = [slow.receive(PATIENCE) for _ in range(1000)]
    sending.result(PATIENCE)
    assert received == receiving.result(PATIENCE) == [StepPlan(step) for step in range(1000)]


def test_a_writer_that_meets_a_full_ring_names_the_slow_ranks(connect: Connect) -> None:
    writer, [quick, *_] = connect(3)
    with pytest.raises(EngineError, match=r"ranks 2, 3 did not make room .* within 0\.05 s"):
        for step in range(1000):
            writer.send(StepPlan(step), timeout=0.05)
            quick.receive(0)


def test_the_wait_for_acknowledgements_names_who_is_behind(connect: Connect) -> None:
    writer, [first, second] = connect(2)
    writer.send(StepPlan(0))
    first.acknowledge(0)
    with pytest.raises(EngineError, match=r"^rank 2 did not carry out step 0 within 0 s"):
        writer.wait_acknowledged(0, timeout=0)
    second.acknowledge(0)
    writer.wait_acknowledged(0, timeout=0)


def test_a_killed_reader_is_named(writer_to: ToProcesses) -> None:
    writer, [_, victim, _] = writer_to(IDLE_READER, IDLE_READER, IDLE_READER)
    writer.check_readers()
    victim.kill()
    victim.wait()
    with pytest.raises(EngineError, match=rf"^rank 2 \(process {victim.pid}\) ended unexpectedly$"):
        writer.check_readers()
    # A writer that was to wait for room learns the same instead of waiting.
    with pytest.raises(EngineError, match=r"rank 2 .* ended"):
        for step in range(1000):
            writer.send(StepPlan(step), 10 * PATIENCE)


def test_a_reader_killed_while_the_writer_waits_for_it_is_named_at_once(
    writer_to: ToProcesses, threads: ThreadPoolExecutor
) -> None:
    writer, [victim] = writer_to(IDLE_READER)
    waiting = threads.submit(writer.wait_acknowledged, 0, 10 * PATIENCE)
    victim.kill()
    with pytest.raises(EngineError, match=r"rank 1 .* ended unexpectedly"):
        waiting.result(PATIENCE)


def test_a_readers_error_text_arrives_even_if_it_ends_right_after(writer_to: ToProcesses) -> None:
    writer, [_, failing] = writer_to(IDLE_READER, FAILING_READER)
    assert failing.wait(PATIENCE) == 0
    with pytest.raises(EngineError, match=r"^rank 2 failed: no memory left for layer 3$"):
        writer.check_readers()


def test_a_dead_rank_is_named_before_the_errors_of_those_that_lost_it(connect: Connect) -> None:
    writer, [first, second] = connect(2)
    first.report_error("connection reset by peer")
    second.close()
    with pytest.raises(EngineError, match=r"^rank 2 \(process \d+\) ended unexpectedly; rank 1 failed: conn"):
        writer.check_readers()


def test_an_error_wakes_the_waiting_writer(connect: Connect, threads: ThreadPoolExecutor) -> None:
    writer, [reader] = connect(1)
    waiting = threads.submit(writer.wait_acknowledged, 0, 10 * PATIENCE)
    time.sleep(0.02)
    reader.report_error("bad layer")
    with pytest.raises(EngineError, match=r"^rank 1 failed: bad layer$"):
        waiting.result(PATIENCE)


def test_the_writer_sees_each_readers_signs_of_life(connect: Connect) -> None:
    writer, [one, two] = connect(2)
    writer.send(StepPlan(0))
    assert one.receive(PATIENCE) == StepPlan(0)
    one.acknowledge(0)
    one.report_memory(5 << 40)
    two.report_memory(7)
    assert [(each.acknowledged, each.memory_used) for each in writer.statuses] == [(0, 5 << 40), (-1, 7)]
    time.sleep(0.05)
    assert two.receive(PATIENCE) == StepPlan(0)
    young = writer.statuses[1].silence
    assert writer.statuses[0].silence - young >= 0.05


@pytest.mark.parametrize(("text", "arrives"), [("", "unknown error"), ("€" * 5000, "€" * 1352), ("\udcff", "\\udcff")])
def test_error_texts_of_any_kind_arrive_as_far_as_they_fit(connect: Connect, text: str, arrives: str) -> None:
    writer, [reader] = connect(1)
    reader.report_error(text)
    with pytest.raises(EngineError) as caught:
        writer.check_readers()
    assert str(caught.value) == f"rank 1 failed: {arrives}"


def test_a_reader_learns_that_the_writer_was_killed_after_it_read_what_was_sent(start: Start) -> None:
    process = start(WRITER)
    assert process.stdout is not None
    handle = process.stdout.readline().strip()
    reader = StepChannelReader.attach(handle, 0, PATIENCE)
    assert process.stdout.readline() == "sent\n"
    process.kill()
    process.wait()
    assert reader.receive(PATIENCE) == StepPlan(0)
    with pytest.raises(EngineError, match="rank 0 ended"):
        reader.receive()
    reader.close()
    assert handle not in Path("/proc/net/unix").read_text()


def test_a_reader_asleep_learns_at_once_that_the_writer_ended(
    connect: Connect, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "HEARTBEAT_SECONDS", 10 * PATIENCE)
    writer, [reader] = connect(1)
    receiving = threads.submit(reader.receive)
    time.sleep(0.02)
    writer.close()
    with pytest.raises(EngineError, match="rank 0 ended"):
        receiving.result(PATIENCE)


def test_a_busy_reader_can_ask_whether_the_writer_ended(connect: Connect) -> None:
    writer, [reader] = connect(1)
    writer.send(StepPlan(0))
    reader.check_writer()
    writer.close()
    with pytest.raises(EngineError, match="rank 0 ended"):
        reader.check_writer()
    assert reader.receive(PATIENCE) == StepPlan(0)


def test_a_whole_frame_of_another_number_is_refused() -> None:
    ring, descriptor = Ring.create(num_readers=1, capacity=SMALL_RING)
    ring.write_frame(0, 7, memoryview(b"payload"), last=True)
    assert ring.read_frame(0, 7) == (b"payload", True)
    with pytest.raises(EngineError, match="frame 8 of the step channel is damaged"):
        ring.read_frame(0, 8)
    ring.close()
    os.close(descriptor)


def alter(offset_from_marker: int) -> Callable[[], None]:
    """Flips a bit of the ring near the marker token; the returned function flips it back."""
    descriptors = [path for name in os.listdir("/proc/self/fd") if os.path.islink(path := f"/proc/self/fd/{name}")]
    [ring, *_] = [path for path in descriptors if os.readlink(path).startswith("/memfd:paceline-steps")]
    with open(ring, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    position = memory.find(MARKER.to_bytes(4, "little")) + offset_from_marker

    def flip() -> None:
        memory[position] ^= 1

    flip()
    return flip


MARKER = 0x5EA4C0DE
# From the marker back to the frame's start: msgpack's five bytes (array, version, step, and bin8 with its length).
TO_PAYLOAD = -5
TO_FRAME = TO_PAYLOAD - 24


@pytest.mark.parametrize(
    "offset",
    [0, TO_PAYLOAD, TO_FRAME, TO_FRAME + 8, TO_FRAME + 16, TO_FRAME + 19, TO_FRAME + 20],
    ids=["token", "payload", "checksum", "number", "length", "length of 16 MiB more", "last"],
)
def test_any_altered_bit_of_a_frame_is_noticed(connect: Connect, offset: int) -> None:
    writer, [reader] = connect(1)
    writer.send(StepPlan(0, freed=[MARKER]))
    alter(offset)
    with pytest.raises(EngineError, match="frame 0 of the step channel is damaged"):
        reader.receive(PATIENCE)


def test_bytes_that_become_visible_after_the_published_word_are_waited_for(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, [reader] = connect(1)
    writer.send(StepPlan(0, freed=[MARKER]))
    restore = alter(0)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            restore()

    monkeypatch.setattr("paceline.coordinator.ring.time.sleep", sleep)
    plan = reader.receive(PATIENCE)
    assert isinstance(plan, StepPlan)
    assert list(plan.freed) == [MARKER]
    assert len(pauses) == 3
