"""The step channel to the ranks of this host: rank 0 writes, the others read every message in order.

Messages travel through shared memory (see ring.py). Each reader also holds a connection to the writer: over it the
reader got the memory's file descriptor, and when either process ends, however it ends, the kernel hangs up and the
other knows at once. Waking is by eventfd: one a reader, written after each frame, and one for the writer, written
after each change of a status. An eventfd is a counter, so that a wake sent before the sleep is not lost.

Nothing here has a name in a file system: the handle is an abstract Unix socket address (unix(7)), which ends with its
process, and both sides turn away other users.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from paceline.coordinator import wire
from paceline.coordinator.errors import EngineError, InputError
from paceline.coordinator.messages import Shutdown, StepPlan
from paceline.coordinator.ring import FRAME_OVERHEAD, PAGE, ReaderStatus, Ring

DEFAULT_CAPACITY = 8 * 1024 * 1024
ATTACH_TIMEOUT = 60.0
SEND_TIMEOUT = 60.0

SPIN_SECONDS = 200e-6
"""How long a reader looks for the next message before it sleeps: about two wake-ups' time."""
HEARTBEAT_SECONDS = 0.5
WRITER_ENDED = "rank 0 ended without a shutdown message: see its log"

_INDEX = struct.Struct("<I")
_PEER_CREDENTIALS = struct.Struct("iII")


class StepChannelWriter:
    """Rank 0's end, for one thread. Reader i belongs to rank i + 1."""

    def __init__(self, ring: Ring, ring_fd: int, listener: socket.socket) -> None:
        self._ring = ring
        self._ring_fd = ring_fd
        self._listener = listener
        self.handle: str = listener.getsockname()[1:].decode()
        """What another process of the same user attaches by."""
        self._connections: dict[int, socket.socket] = {}
        self._process_ids: dict[int, int] = {}
        self._wakes = [os.eventfd(0, os.EFD_NONBLOCK) for _ in ring.statuses]
        self._progress = os.eventfd(0, os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._progress, select.POLLIN)
        self._position = 0
        self._next_frame = 0
        self._consumed_by_all = 0
        self._closed = False

    @classmethod
    def create(cls, num_readers: int, capacity: int = DEFAULT_CAPACITY) -> StepChannelWriter:
        """A channel to `num_readers` processes through a ring of `capacity` bytes (a whole number of 4 KiB pages)."""
        if num_readers < 1:
            raise InputError(f"a step channel needs at least 1 reader, got {num_readers}")
        if capacity < PAGE or capacity % PAGE:
            raise InputError(f"capacity must be a positive multiple of {PAGE} bytes, got {capacity}")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0paceline-steps-{secrets.token_hex(16)}".encode())
        listener.listen(num_readers)
        return cls(*Ring.create(num_readers, capacity), listener)

    def wait_attached(self, timeout: float = ATTACH_TIMEOUT) -> None:
        """Let every reader in; call it once the handle is on its way to them, and before the first send().

        Raises EngineError naming the ranks that did not come within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        try:
            while len(self._connections) < len(self._wakes):
                self._listener.settimeout(max(deadline - time.monotonic(), 1e-3))
                connection, _ = self._listener.accept()
                self._admit(connection, deadline)
        except TimeoutError as error:
            missing = [index for index in range(len(self._wakes)) if index not in self._connections]
            raise EngineError(
                f"{_ranks(missing)} did not attach to the step channel within {timeout:g} s: see their logs"
            ) from error
        self._listener.close()

    def send(self, message: StepPlan | Shutdown, timeout: float = SEND_TIMEOUT) -> None:
        """Publish a message; blocks while the ring is full.

        Raises EngineError naming the rank where one ended or erred meanwhile, or made no room for `timeout` seconds;
        the channel is of no more use then.
        """
        if len(self._connections) < len(self._wakes):
            raise EngineError("step channel used before every rank attached: call wait_attached() first")
        payload = memoryview(wire.encode(message))
        # A quarter of the ring a frame: a long message flows through while readers take out its beginning.
        most = self._ring.capacity // 4
        for start in range(0, len(payload), most):
            self._send_frame(payload[start : start + most], start + most >= len(payload), timeout)

    def wait_acknowledged(self, step: int, timeout: float) -> None:
        """Return once every reader carried out `step`; raises EngineError as send() does."""
        self._wait(lambda status: status.acknowledged >= step, timeout, f"carry out step {step}")

    @property
    def statuses(self) -> Sequence[ReaderStatus]:
        """What every reader says of itself, by its index; to be read only."""
        return self._ring.statuses

    def check_readers(self) -> None:
        """Raise EngineError where a reader ended or reported an error, naming its rank and giving its words."""
        # Hang-ups are gathered before error texts, since a reader that fails reports first and ends then. They are
        # told first: the errors of the others are most often that they lost the dead one.
        hung_up = {fd for fd, events in self._poll.poll(0) if events & (select.POLLHUP | select.POLLERR)}
        errors = {index: status.error for index, status in enumerate(self._ring.statuses)}
        problems = [
            f"rank {index + 1} (process {self._process_ids[index]}) ended unexpectedly"
            for index, connection in sorted(self._connections.items())
            if connection.fileno() in hung_up and errors[index] is None
        ]
        problems += [f"rank {index + 1} failed: {text}" for index, text in errors.items() if text is not None]
        if problems:
            raise EngineError("; ".join(problems))

    def close(self) -> None:
        """Let go of everything; again does nothing. Readers still get what was sent, then learn that rank 0 ended."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        for connection in self._connections.values():
            connection.close()
        for fd in (*self._wakes, self._progress, self._ring_fd):
            os.close(fd)
        self._ring.close()

    def _admit(self, connection: socket.socket, deadline: float) -> None:
        process_id, user_id = _peer(connection)
        if user_id != os.getuid():
            connection.close()
            return
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        hello = connection.recv(_INDEX.size)
        index = _INDEX.unpack(hello)[0] if len(hello) == _INDEX.size else -1
        if index in self._connections or not 0 <= index < len(self._wakes):
            connection.close()
            raise EngineError(f"process {process_id} attached to the step channel as reader {index}, which is not free")
        socket.send_fds(
            connection, [_INDEX.pack(len(self._wakes))], [self._ring_fd, self._wakes[index], self._progress]
        )
        self._connections[index] = connection
        self._process_ids[index] = process_id
        self._poll.register(connection, 0)  # no events asked for: a hang-up is reported always

    def _send_frame(self, payload: memoryview, last: bool, timeout: float) -> None:
        overwritten = self._position + FRAME_OVERHEAD + len(payload) - self._ring.capacity
        if overwritten > self._consumed_by_all:
            self._wait(lambda status: status.consumed >= overwritten, timeout, "make room in the step channel")
            self._consumed_by_all = min(status.consumed for status in self._ring.statuses)
        self._position = self._ring.write_frame(self._position, self._next_frame, payload, last)
        self._next_frame += 1
        for wake in self._wakes:
            os.eventfd_write(wake, 1)

    def _wait(self, done: Callable[[ReaderStatus], bool], timeout: float, task: str) -> None:
        deadline = time.monotonic() + timeout
        while True:
            _drain(self._progress)
            behind = [index for index, status in enumerate(self._ring.statuses) if not done(status)]
            if not behind:
                return
            self.check_readers()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                silence = max(self._ring.statuses[index].silence for index in behind)
                raise EngineError(
                    f"{_ranks(behind)} did not {task} within {timeout:g} s (last sign of life {silence:.1f} s ago)"
                )
            self._poll.poll(remaining * 1e3)


class StepChannelReader:
    """The end of a rank other than 0; for one thread."""

    def __init__(self, ring: Ring, index: int, connection: socket.socket, wake: int, progress: int) -> None:
        self._ring = ring
        self._status = ring.statuses[index]
        self._connection = connection
        self._wake = wake
        self._progress = progress
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)
        self._poll.register(connection, 0)
        self._position = 0
        self._next_frame = 0
        self._parts: list[bytes] = []
        self._closed = False
        self._status.beat()

    @classmethod
    def attach(cls, handle: str, index: int, timeout: float = ATTACH_TIMEOUT) -> StepChannelReader:
        """Join the channel as reader `index` (0 to num_readers - 1); returns once the writer has let it in.

        Raises EngineError where the writer is gone, runs as another user, or does not answer within `timeout` seconds.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(b"\0" + handle.encode())
            if _peer(connection)[1] != os.getuid():
                raise PermissionError("it belongs to another user")
            connection.sendall(_INDEX.pack(index))
            answer, descriptors, _, _ = socket.recv_fds(connection, _INDEX.size, 3)
            if len(answer) < _INDEX.size or len(descriptors) < 3:
                raise ConnectionError("the writer turned this reader away")
        except OSError as error:
            connection.close()
            raise EngineError(f"reader {index} cannot attach to step channel {handle}: {error}") from error
        ring_fd, wake, progress = descriptors
        ring = Ring(ring_fd, _INDEX.unpack(answer)[0])
        os.close(ring_fd)
        return cls(ring, index, connection, wake, progress)

    def receive(self, timeout: float | None = None) -> StepPlan | Shutdown | None:
        """The next message; None where none came within `timeout` seconds (None waits without end).

        Raises EngineError where rank 0 ended without a Shutdown, or where the bytes were damaged on the way.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while self._wait_published(deadline):
            payload, last = self._ring.read_frame(self._position, self._next_frame)
            self._parts.append(payload)
            self._position += FRAME_OVERHEAD + len(payload)
            self._next_frame += 1
            self._status.consumed = self._position
            os.eventfd_write(self._progress, 1)
            if last:
                message = b"".join(self._parts)
                self._parts.clear()
                return wire.decode(message)
        return None

    def acknowledge(self, step: int) -> None:
        """Tell the writer that every step up to this one is carried out."""
        self._status.beat()
        self._status.acknowledged = step
        os.eventfd_write(self._progress, 1)

    def report_memory(self, used: int) -> None:
        """Tell the writer how many bytes are in use on this rank's device; nobody is woken for it."""
        self._status.memory_used = used

    def report_error(self, text: str) -> None:
        """Tell the writer what failed here; the first 4,056 bytes of the text arrive."""
        self._status.error = text
        os.eventfd_write(self._progress, 1)

    def check_writer(self) -> None:
        """Raise EngineError where rank 0 has ended, or has closed the channel."""
        if self._hung_up(0):
            raise EngineError(WRITER_ENDED)

    def await_writer_end(self, timeout: float) -> None:
        """Return once the writer's process has ended, after `timeout` seconds at the latest."""
        try:
            process = os.pidfd_open(_peer(self._connection)[0])
        except ProcessLookupError:
            return
        try:
            select.select([process], [], [], timeout)
        finally:
            os.close(process)

    def close(self) -> None:
        """Let go of everything; again does nothing. To the writer this rank has ended."""
        if self._closed:
            return
        self._closed = True
        self._connection.close()
        os.close(self._wake)
        os.close(self._progress)
        self._ring.close()

    def _wait_published(self, deadline: float) -> bool:
        """Whether a frame that was not read yet is there before the deadline (on the monotonic clock)."""
        self._status.beat()
        spin_until = min(time.monotonic() + SPIN_SECONDS, deadline)
        while time.monotonic() < spin_until:
            if self._ring.published > self._position:
                return True
            os.sched_yield()
        hung_up = False
        while True:
            _drain(self._wake)
            if self._ring.published > self._position:
                return True
            # Looked at only now, so that what the writer sent before it ended is received first.
            if hung_up:
                raise EngineError(WRITER_ENDED)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            hung_up = self._hung_up(min(remaining, HEARTBEAT_SECONDS))
            self._status.beat()

    def _hung_up(self, seconds: float) -> bool:
        """Whether the writer is gone; waits for that, or for a frame, for so long."""
        events = self._poll.poll(seconds * 1e3)
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in events)


def _drain(eventfd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(eventfd)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id at the other end (SO_PEERCRED, unix(7))."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    process_id, user_id, _ = _PEER_CREDENTIALS.unpack(credentials)
    return process_id, user_id


def _ranks(indices: list[int]) -> str:
    """Readers as a person knows them: `rank 2`, or `ranks 2, 3`."""
    return f"rank{'s' if len(indices) > 1 else ''} {', '.join(str(index + 1) for index in indices)}"
