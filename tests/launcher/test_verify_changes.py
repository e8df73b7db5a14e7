"""A checkpoint that changes while it is verified, and one that differs: one line for all ranks, and an exit status."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"
AGAIN = "cannot be read again (verify it once nobody writes to it)"

RANK = """
    import os, sys
    import paceline.worker.verification as verification
    from paceline.launcher.__main__ import main
    from paceline.model.checkpoint_tensors import CheckpointTensors

    def cut(path):
        os.truncate(path, os.path.getsize(path) // 2)

    def lengthen(path):
        with open(path, "ab") as file:
            file.write(bytes(100))

    def take_away(path):
        os.unlink(path)

    def replace(path):
        os.replace(path.with_name("another"), path)

    change = locals()[os.environ["CHANGE"]]
    if os.environ["WHEN"] == "before":  # all ranks have loaded by then
        check = verification.ShardVerifier._check_shards

        def changed_first(self, model, plan, comm):
            if comm.rank == 0:
                change(self._folder / "model.safetensors")
            return check(self, model, plan, comm)

        verification.ShardVerifier._check_shards = changed_first
    else:
        opening = CheckpointTensors._open

        def changed_then(self, file_name):
            opened = opening(self, file_name)
            change(self._folder / file_name)
            return opened

        CheckpointTensors._open = changed_then
    main()
"""
RANKS = "import sys; from paceline.launcher.start import run_ranks; sys.exit(run_ranks(sys.argv[1:], 2))"


@pytest.fixture
def folder(tmp_path: Path, tiny: Callable[..., Any]) -> Path:
    """A tiny Llama, and another file for its weights, with one value changed."""
    found = tmp_path / "model"
    shutil.copytree(tiny("llama").folder, found)
    content = load_file(found / "model.safetensors")
    content[NORM][5] = 9.0
    save_file(content, found / "another")
    return found


@pytest.fixture
def verify(folder: Path, tmp_path: Path) -> Callable[..., tuple[int, list[str], str]]:
    """verify(change, when, tp): exit status, the lines of stderr but those of loading, stdout."""

    def run(change: str, when: str, tp: str) -> tuple[int, list[str], str]:
        script = tmp_path / "rank.py"
        script.write_text(textwrap.dedent(RANK))
        start = ["-c", RANKS] if tp == "2" else []
        command = [sys.executable, *start, str(script), "verify", str(folder), "--no-forward", "--tp", tp]
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "CHANGE": change, "WHEN": when}
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
        lines = [line for line in result.stderr.splitlines() if not line.startswith("paceline: loaded")]
        return result.returncode, lines, result.stdout

    return run


@pytest.mark.parametrize(
    ("change", "when", "message"),
    [
        ("cut", "before", f"checkpoint FOLDER {AGAIN}: model.safetensors is cut short: it has "),
        ("cut", "while it is read", f" in model.safetensors {AGAIN}: the file ends before it"),
        ("take_away", "before", "FOLDER has no *.safetensors files"),
    ],
)
def test_a_file_that_changes_is_one_line_of_all_ranks(
    change: str, when: str, message: str, folder: Path, verify: Callable[..., tuple[int, list[str], str]]
) -> None:
    """The library's own way to read a file that was cut ends the process by SIGBUS."""
    status, lines, out = verify(change, when, "2")
    assert (status, len(lines), out) == (2, 1, ""), lines
    assert lines[0].startswith("paceline: rank 0: ")
    assert message.replace("FOLDER", str(folder)) in lines[0]


def test_the_same_of_ranks_in_one_process(folder: Path, verify: Callable[..., tuple[int, list[str], str]]) -> None:
    status, lines, out = verify("lengthen", "before", "1..2")
    assert (status, len(lines), out) == (2, 1, ""), lines
    assert lines[0].startswith(f"paceline: checkpoint {folder} {AGAIN}: model.safetensors is damaged")


def test_a_difference_is_said_once(folder: Path, verify: Callable[..., tuple[int, list[str], str]]) -> None:
    expected = load_file(folder / "model.safetensors")[NORM][5].item()
    status, lines, out = verify("replace", "before", "2")
    wanted = f"at 2 ranks, {NORM} on rank 0 at [5]: found {expected!r}, and the checkpoint has 9.0"
    assert (status, lines) == (1, [f"paceline: {wanted}"])
    assert "NOT verified: 1 of 1 numbers of ranks differ" in out.splitlines()


def test_a_tied_head_is_verified_where_the_checkpoint_has_one(folder: Path) -> None:
    def run(*options: str) -> str:
        command = [
            sys.executable,
            "-m",
            "paceline.launcher.start",
            "verify",
            str(folder),
            "--no-forward",
            "--tp",
            "1..2",
        ]
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        result = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, timeout=240)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def checked() -> set[bool]:
        return {result["tied_head_checked"] for result in json.loads(run("--json"))["results"]}

    assert checked() == {False}
    content = load_file(folder / "model.safetensors")
    save_file(content | {"lm_head.weight": content[EMBED].clone()}, folder / "model.safetensors")
    assert checked() == {True}
    line = "verified: the checkpoint's lm_head.weight is the embedding again, to which config.json ties it"
    assert line in run().splitlines()
