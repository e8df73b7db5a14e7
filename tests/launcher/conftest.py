"""The default model, made once a session by two processes at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class MadeModel:
    """What two processes that made the default model together had to say."""

    cache: Path
    folders: list[str]
    messages: list[str]

    @property
    def folder(self) -> Path:
        return Path(self.folders[0])


@pytest.fixture(scope="session")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeModel]:
    """The default model, fetched and converted for real into a cache of its own."""
    cache = tmp_path_factory.mktemp("paceline-cache")
    code = "from paceline.launcher.default_model import default_model_path as make; print(make())"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PACELINE_CACHE": str(cache), "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    yield MadeModel(cache, [out.strip() for out, _ in outputs], [err for _, err in outputs])
    shutil.rmtree(cache)


@pytest.fixture(scope="session")
def default_model(made_model: MadeModel) -> Path:
    """Folder of the default model's checkpoint."""
    return made_model.folder
