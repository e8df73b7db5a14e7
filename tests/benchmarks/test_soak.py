"""64 clients that leave a real server at random leave nothing: a short run of the benchmark that looks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_b53_clients_that_leave_in_every_way_leave_nothing(tiny: Callable[..., Any]) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--seconds", "3"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    result = subprocess.run(
        [*command, "--model", str(tiny("llama").folder)], capture_output=True, text=True, env=environment, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    figures = dict(line.rsplit(maxsplit=1) for line in result.stdout.splitlines())
    for kind in ("finished", "left at once", "left in between", "closed their side", "left while waiting"):
        assert int(figures[f"requests {kind}"]) > 0
    assert figures["left_behind"] == "{}"
