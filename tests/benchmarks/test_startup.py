"""The benchmark of starts says what a start took, from the process's beginning on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_a_start_is_told_by_its_parts(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import startup

    arguments = ["--folder", str(tiny("qwen3").folder), "--device", "cpu", "--rounds", "1"]
    monkeypatch.setenv("PYTHONPATH", str(Path(startup.__file__).parent), prepend=os.pathsep)  # as launch.sh does
    monkeypatch.setattr("sys.argv", ["startup.py", *arguments])
    startup.main()
    lines = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()[1:-1]]
    for column in (1, 2):
        seconds = {line[0]: float(line[column]) for line in lines}
        assert 0 < seconds["  torch"] < seconds["imports"] < seconds["engine ready"] <= seconds["first token"]
        steps = [value for name, value in seconds.items() if not name.startswith(" ")]
        *parts, ready, _ = steps
        assert sum(parts) == pytest.approx(ready, abs=0.01 * len(parts))
