"""Log lines are written by a thread: in order, none twice, and without making anybody wait."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.launcher.json_log import BackgroundHandler, JsonFormatter, log_event


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its ends: to read from, and to write to."""
    reading, writing = os.pipe()
    yield reading, writing
    os.close(writing)


def logger_to(descriptor: int, **options: Any) -> tuple[logging.Logger, BackgroundHandler]:
    """A logger of its own that writes there."""
    handler = BackgroundHandler(descriptor, **options)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("own")
    logger.addHandler(handler)
    return logger, handler


def lines_of(reading: int) -> Iterator[dict[str, Any]]:
    with os.fdopen(reading) as file:
        yield from map(json.loads, file)


def test_who_logs_does_not_wait_for_who_reads(pipe: tuple[int, int]) -> None:
    """More lines than the pipe and the queue hold: the rest is counted, and said once somebody reads again."""
    reading, writing = pipe
    logger, handler = logger_to(writing, max_waiting=500)
    for number in range(5000):
        log_event(logger, "request", place=number, path="x" * 100)
    lines = lines_of(reading)
    places: list[int] = []
    lost = 0
    while len(places) + lost < 5000:
        line = next(lines)
        if line["event"] == "log_lines_lost":
            lost += line["number"]
        else:
            places.append(line["place"])
    assert lost > 1000
    assert places == sorted(set(places))
    log_event(logger, "last")
    assert next(lines)["event"] == "last"
    handler.flush()


def test_a_reader_that_has_gone_is_no_trouble(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    logger, handler = logger_to(writing)
    os.close(reading)
    for _ in range(100):
        log_event(logger, "request")
    handler.flush()


def test_a_pipe_that_does_not_block_loses_nothing(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    logger, _ = logger_to(writing)
    for number in range(3000):
        log_event(logger, "request", place=number)
    lines = lines_of(reading)
    assert [next(lines)["place"] for _ in range(3000)] == list(range(3000))


def test_the_end_of_the_process_writes_what_waits(tmp_path: Path) -> None:
    code = """
import logging
from paceline.launcher.json_log import log_as_json, log_event
log_as_json()
for number in range(2000):
    log_event(logging.getLogger("paceline"), "request", place=number)
"""
    with (tmp_path / "log").open("w") as file:
        subprocess.run([sys.executable, "-c", code], stderr=file, check=True)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["place"] for line in lines] == list(range(2000))
