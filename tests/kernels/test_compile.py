"""Every kernel compiles for Hopper; no GPU is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST_AND_NEWEST = ("3.6.0", "3.9.0")
"""Of Triton; .ci/run installs them, beside the one that the tests run with."""


def folder_of(version: str) -> Path:
    return Path(sys.prefix) / f"triton-{version}"


def compile_all(caches: Path, python_path: str) -> str:
    """What was compiled, in words."""
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(caches), "PYTHONPATH": python_path}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_every_kernel_compiles_for_sm_90(tmp_path: Path) -> None:
    if all(folder_of(version).exists() for version in OLDEST_AND_NEWEST):
        pytest.skip("an older and a newer Triton compile them")  # it takes a minute each
    compile_all(tmp_path, os.environ.get("PYTHONPATH", ""))


@pytest.mark.parametrize("version", OLDEST_AND_NEWEST)
def test_every_kernel_compiles_with_the_oldest_and_the_newest_triton(version: str, tmp_path: Path) -> None:
    folder = folder_of(version)
    if not folder.exists():
        pytest.skip(f"no Triton {version} in {folder}")
    said = compile_all(tmp_path, os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    assert said.startswith(f"Triton {version} compiled ")
