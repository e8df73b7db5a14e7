"""The shared memory of a step channel: a ring of frames with one writer, and a status page for each reader.

Layout, in pages of 4 KiB: the writer's page (the published word), one page a reader (its status), then the ring.
Positions count bytes since the start and never wrap; a frame's place in the ring is its position modulo the capacity.

Order of memory. The writer stores a frame's bytes, then the published word; a reader loads the word, then the bytes.
x86-64 keeps both in order for the other core. Weaker machines (aarch64) may show the word before the bytes: then
the frame's checksum fails, and the reader looks again before it calls the frame damaged. Words are 8 bytes, aligned,
and written by one process each; memoryview stores and loads a `Q` in one piece, which struct.pack_into does not.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

import xxhash

from paceline.coordinator.errors import EngineError

PAGE = 4096
_WORD = 8

_CHECKSUM = struct.Struct("<Q")
"""xxh3-64 of the rest of the frame."""
_HEAD = struct.Struct("<QII")
"""Number of the frame, bytes of its payload, whether it is the last of its message."""
FRAME_OVERHEAD = _CHECKSUM.size + _HEAD.size

READ_ATTEMPTS = 10
READ_PAUSE_SECONDS = 0.001


class ReaderStatus:
    """One reader's page: written by that reader alone, read by the writer."""

    _CONSUMED, _ACKNOWLEDGED, _HEARTBEAT, _MEMORY_USED, _ERROR_SIZE, _TEXT = 0, 1, 2, 3, 4, 5 * _WORD
    MAX_ERROR_BYTES = PAGE - _TEXT

    def __init__(self, page: memoryview) -> None:
        self._bytes = page
        self._words = page.cast("Q")

    @property
    def consumed(self) -> int:
        """Bytes taken out of the ring since the start."""
        return self._words[self._CONSUMED]

    @consumed.setter
    def consumed(self, position: int) -> None:
        self._words[self._CONSUMED] = position

    @property
    def acknowledged(self) -> int:
        """The last step carried out; -1 before the first."""
        return self._words[self._ACKNOWLEDGED] - 1

    @acknowledged.setter
    def acknowledged(self, step: int) -> None:
        self._words[self._ACKNOWLEDGED] = step + 1

    @property
    def silence(self) -> float:
        """Seconds since the last beat()."""
        return (time.monotonic_ns() - self._words[self._HEARTBEAT]) / 1e9

    def beat(self) -> None:
        """Note that the reader is alive now (the monotonic clock is one for all processes of a host)."""
        self._words[self._HEARTBEAT] = time.monotonic_ns()

    @property
    def memory_used(self) -> int:
        """Bytes in use on the reader's device, as it said last."""
        return self._words[self._MEMORY_USED]

    @memory_used.setter
    def memory_used(self, size: int) -> None:
        self._words[self._MEMORY_USED] = size

    @property
    def error(self) -> str | None:
        """What the reader reported; None where it reported nothing."""
        size = self._words[self._ERROR_SIZE]
        if size == 0:
            return None
        # Cutting a long text at a number of bytes may have cut its last character.
        return bytes(self._bytes[self._TEXT : self._TEXT + size]).decode(errors="ignore")

    @error.setter
    def error(self, text: str) -> None:
        encoded = (text or "unknown error").encode(errors="backslashreplace")[: self.MAX_ERROR_BYTES]
        self._bytes[self._TEXT : self._TEXT + len(encoded)] = encoded
        self._words[self._ERROR_SIZE] = len(encoded)

    def release(self) -> None:
        """Drop the views, so that the memory can be unmapped."""
        self._words.release()
        self._bytes.release()


class Ring:
    """The memory mapped into this process; `statuses` are the readers' pages in order."""

    def __init__(self, fd: int, num_readers: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        memory = memoryview(self._map)
        data_start = PAGE * (1 + num_readers)
        self._writer_words = memory[:PAGE].cast("Q")
        self.statuses = [ReaderStatus(memory[PAGE * (1 + i) : PAGE * (2 + i)]) for i in range(num_readers)]
        self._data = memory[data_start:]
        memory.release()
        self.capacity = len(self._data)

    @classmethod
    def create(cls, num_readers: int, capacity: int) -> tuple[Ring, int]:
        """A new ring of `capacity` bytes, and the file descriptor by which others map it.

        The file has no name, so that nothing is left behind however its processes end.
        """
        fd = os.memfd_create("paceline-steps")
        os.ftruncate(fd, PAGE * (1 + num_readers) + capacity)
        return cls(fd, num_readers), fd

    @property
    def published(self) -> int:
        """Bytes of whole frames written since the start."""
        return self._writer_words[0]

    def write_frame(self, position: int, number: int, payload: memoryview, last: bool) -> int:
        """Write and publish a frame at `position`, where the caller saw that there is room; the position after it."""
        body = _HEAD.pack(number, len(payload), last) + payload
        frame = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) + body
        start = position % self.capacity
        until_end = min(len(frame), self.capacity - start)
        self._data[start : start + until_end] = frame[:until_end]
        self._data[: len(frame) - until_end] = frame[until_end:]
        self._writer_words[0] = position + len(frame)
        return position + len(frame)

    def read_frame(self, position: int, number: int) -> tuple[bytes, bool]:
        """Payload of the published frame at `position`, and whether it ends its message.

        Raises EngineError where the bytes are not frame `number` with a right checksum.
        """
        for attempt in range(READ_ATTEMPTS):
            if attempt:
                time.sleep(READ_PAUSE_SECONDS)
            body = self._read_body(position)
            if body is not None:
                found, _, last = _HEAD.unpack_from(body)
                if found == number:
                    return body[_HEAD.size :], bool(last)
        raise EngineError(
            f"frame {number} of the step channel is damaged: another process wrote into its memory,"
            " or the host's memory is faulty; restart the engine"
        )

    def _read_body(self, position: int) -> bytes | None:
        """A frame's head and payload; None where the checksum does not match them."""
        prefix = self._copy(position, FRAME_OVERHEAD)
        (checksum,) = _CHECKSUM.unpack_from(prefix)
        _, payload_size, _ = _HEAD.unpack_from(prefix, _CHECKSUM.size)
        body = self._copy(position + _CHECKSUM.size, _HEAD.size + payload_size)
        return body if xxhash.xxh3_64_intdigest(body) == checksum else None

    def _copy(self, position: int, size: int) -> bytes:
        start = position % self.capacity
        until_end = min(size, self.capacity - start)
        return bytes(self._data[start : start + until_end]) + bytes(self._data[: size - until_end])

    def close(self) -> None:
        """Unmap the memory; again does nothing."""
        for status in self.statuses:
            status.release()
        self._writer_words.release()
        self._data.release()
        self._map.close()
