"""A signal to `generate` on several ranks ends all of them, and none is blamed for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_blames_no_rank(default_model: Any, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "paceline.launcher.start", "generate", "Count:", "--model", str(default_model)]
    options = ["--tp", "2", "--device", "cpu", "--max-tokens", "2000", "--ignore-eos", "--raw", "--stream"]
    process = subprocess.Popen(
        [*command, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)  # it is under way
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + number
    assert [line for line in errors.splitlines() if "loaded 0." not in line] == []
