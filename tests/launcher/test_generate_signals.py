"""A signal to `generate` on several ranks ends all of them, and none is blamed for it; a rank that dies is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest


class Generate:
    """The command on several ranks, under way."""

    def __init__(self, model: Any, ranks: int) -> None:
        command = [sys.executable, "-m", "paceline.launcher.start", "generate", "Count:", "--model", str(model)]
        options = ["--tp", str(ranks), "--device", "cpu", "--max-tokens", "2000", "--ignore-eos", "--raw", "--stream"]
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*command, *options],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_TEST_MARK": self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.read(1)

    def pid_of(self, rank: int) -> int:
        wanted = {f"PACELINE_TEST_MARK={self._mark}".encode(), f"RANK={rank}".encode()}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted <= {*(folder / "environ").read_bytes().split(b"\0")}:
                    return int(folder.name)
            except OSError:  # ended meanwhile, or of another user
                continue
        raise AssertionError(f"rank {rank} is not there")

    def end(self) -> tuple[int, list[str]]:
        """Exit status, and standard error's lines without those of the start."""
        _, errors = self.process.communicate(timeout=240)
        return self.process.returncode, [line for line in errors.splitlines() if line and "loaded 0." not in line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_blames_no_rank(default_model: Any, number: signal.Signals) -> None:
    generate = Generate(default_model, 2)
    generate.process.send_signal(number)
    assert generate.end() == (128 + number, [])


def test_of_a_rank_that_is_gone_the_others_say_no_more_than_that(default_model: Any) -> None:
    generate = Generate(default_model, 3)
    victim = generate.pid_of(1)
    os.kill(victim, signal.SIGKILL)
    status, (first, last) = generate.end()
    assert status == 128 + signal.SIGKILL
    assert first.startswith(f"paceline: rank 1 (process {victim}) ended unexpectedly")
    assert last == "paceline: rank 1 was ended by SIGKILL; was the memory full?"
