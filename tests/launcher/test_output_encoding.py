"""What is printed arrives in whatever encoding the terminal or the pipe has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_configs import LLAMA


def test_characters_that_the_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "modèle ☃"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    command = [sys.executable, "-m", "paceline.launcher", "verify", str(folder), "--config-only", "--tp", "1"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "latin-1"}
    result = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.startswith("modèle \\u2603, float32\n".encode("latin-1"))
