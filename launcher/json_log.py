"""Log lines that a machine reads: one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from datetime import UTC, datetime
from typing import Any

STANDARD_ERROR = 2
"""Its file descriptor."""
MAX_LINES_WAITING = 10_000
"""Lines that may wait for whoever reads standard error; what comes beyond them is lost, and counted."""
LAST_LINES_SECONDS = 1.0
"""How long the end of the process waits until they are read."""
REST_SECONDS = 0.01
"""Between two writes: to wake the thread that writes costs whoever logs a tenth of what a short request does."""
FULL_SECONDS = 0.01
"""Until the next try where standard error is full and does not block."""


class JsonFormatter(logging.Formatter):
    """{"time", "level", "event"} and the fields that log_event was given; a traceback is the field "exception".

    event is the message, a name where there are fields; time is UTC in ISO 8601.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class BackgroundHandler(logging.Handler):
    """Writes lines from a thread of its own, in their order: nobody who logs waits for whoever reads them.

    A pipe that nobody reads holds 64 KiB, and a write to a full one does not return: an event loop would stand still.
    """

    def __init__(self, descriptor: int, max_waiting: int = MAX_LINES_WAITING) -> None:
        """descriptor: of the open file to write to, which stays open; max_waiting: lines that may wait for it."""
        super().__init__()
        self._descriptor = descriptor
        self._waiting: queue.Queue[str] = queue.Queue(max_waiting)
        self._lost = 0
        self._lost_lock = threading.Lock()
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have the record's line written, or count it as lost."""
        try:
            self._waiting.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._count_lost(1)

    def flush(self) -> None:
        """Wait until what was logged is written, for LAST_LINES_SECONDS at most. logging calls it at the very end."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, LAST_LINES_SECONDS)

    def _write_all(self) -> None:
        while True:
            lines = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    lines.append(self._waiting.get_nowait())
            lost = self._count_lost(0)
            if self._write((self._lost_line(lost) if lost else "") + "".join(lines)):
                self._count_lost(-lost)
            else:
                self._count_lost(len(lines))
            for _ in lines:
                self._waiting.task_done()
            time.sleep(REST_SECONDS)

    def _count_lost(self, more: int) -> int:
        """How many lines were lost that nobody was told of, with these."""
        with self._lost_lock:
            self._lost += more
            return self._lost

    def _lost_line(self, number: int) -> str:
        fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": "log_lines_lost"}
        return self.format(logging.makeLogRecord(fields | {"fields": {"number": number}})) + "\n"

    def _write(self, text: str) -> bool:
        """Whether that worked. Not through sys.stderr, for whose lock the end of the interpreter would wait."""
        data = text.encode()
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # whoever shares it has made it so
                time.sleep(FULL_SECONDS)
            except OSError:  # a full disk, a reader that has gone: there is nowhere else to say so
                return False
        return True


def log_event(
    logger: logging.Logger,
    event: str,
    level: int = logging.INFO,
    *,
    exc_info: BaseException | None = None,
    **fields: Any,
) -> None:
    """Log what has happened by its name, with what there is to know of it, and the traceback of exc_info."""
    logger.log(level, event, exc_info=exc_info, extra={"fields": fields})


def log_as_json() -> None:
    """From now on all that this process logs, Python's warnings included, goes to standard error as JSON."""
    handler = BackgroundHandler(STANDARD_ERROR)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("paceline").setLevel(logging.INFO)
