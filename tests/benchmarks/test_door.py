"""The benchmark of the HTTP process runs, and every stream of it ends as it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_prints_what_the_door_sustains() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "benchmarks" / "door.py"), "--quick"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert result.returncode == 0, result.stderr
    idle, _, row = result.stdout.splitlines()
    assert idle.startswith("idle: first token after ")
    streams, offered, *measured = (float(figure.replace(",", "")) for figure in row.split())
    assert (streams, offered) == (8, 400)
    del measured[2]  # of so few tokens nothing may be left beside the requests
    assert all(figure > 0 for figure in measured)
