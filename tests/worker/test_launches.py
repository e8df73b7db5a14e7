"""What the steps of an engine launch is compiled at its start, side by side; no GPU is needed to see that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import models
import pytest


def test_the_start_compiles_every_variant_that_a_step_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).with_name("launches_of_steps.py")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(models.__file__).parent), prepend=os.pathsep)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
