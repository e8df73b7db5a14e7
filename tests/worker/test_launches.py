"""What the steps of an engine launch is compiled at its start, side by side; no GPU is needed to see that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_start_compiles_every_variant_that_a_step_launches() -> None:
    script = Path(__file__).with_name("launches_of_steps.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
