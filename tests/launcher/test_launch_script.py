"""launch.sh sets up once, on any path, whoever calls it; a failed set-up is not taken for a good one.

Python is stood in for by a script that makes "virtual environments" with itself inside and writes down its calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOOLS = [
    "bash",
    "basename",
    "cat",
    "cp",
    "dirname",
    "env",
    "flock",
    "mkdir",
    "readlink",
    "rm",
    "sha256sum",
    "sleep",
    "tail",
]
"""All that the script may need of a machine, Python apart."""
STAND_IN = """#!/bin/bash
case "$*" in
    "-c import sys, venv"*) exit "${TOO_OLD:-0}" ;;
    "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && echo "version = 3" >"$4/pyvenv.cfg" ;;
    "-m pip --version") ;;
    "-m pip install "*)
        echo "$*" >>"$CALLS"
        sleep 0.2
        if [[ "$*" == *"${PIP_FAILS_ON:-nothing}"* ]]; then echo "pip's own words"; exit 1; fi
        ;;
    *) printf 'ran [%s]' "$@" "$PYTHONSAFEPATH"; echo ;;
esac
"""


@dataclass
class Checkout:
    """A copy of what launch.sh needs, in a folder of its own, and a machine with nothing but a Python."""

    root: Path
    machine: Path

    @property
    def calls(self) -> list[str]:
        """What pip was asked to install, in order."""
        file = self.machine / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def start(self, *arguments: str, script: Path | None = None, **settings: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(script or self.root / "launch.sh"), *arguments],
            cwd=self.machine,
            env={"PATH": str(self.machine), "CALLS": str(self.machine / "calls"), **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, script: Path | None = None, **settings: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        process = self.start(*arguments, script=script, **settings)
        output, errors = process.communicate(timeout=240)
        return process.returncode, output, errors


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a folder, with spaces"
    machine = tmp_path / "machine"
    (root / ".ci").mkdir(parents=True)
    (root / "benchmarks").mkdir()
    machine.mkdir()
    for name in ("launch.sh", "pyproject.toml", ".ci/constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    (root / "benchmarks" / "decode.py").write_text('import timing\n\nif __name__ == "__main__":\n    main()\n')
    (root / "benchmarks" / "timing.py").write_text("def median():\n    pass\n")
    for tool in TOOLS:
        (machine / tool).symlink_to(shutil.which(tool) or "missing")
    python = machine / "python3"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return Checkout(root, machine)


def test_first_run_sets_up_and_answers(checkout: Checkout) -> None:
    code, output, errors = checkout.run()
    start = "ran [-m]ran [paceline.launcher.start]"
    assert (code, output) == (0, f"{start}ran [generate]ran [1]\n")
    assert errors.count("\n") == 1
    torch, rest = checkout.calls
    pins = f"--constraint {checkout.root}/.ci/constraints.txt"
    assert torch.startswith(f"-m pip install {pins} torch --index-url https://download.pytorch.org/whl/cpu")
    assert rest == f"-m pip install {pins} --editable {checkout.root}[dev]"


def test_second_run_is_silent_and_installs_nothing(checkout: Checkout) -> None:
    checkout.run("setup")
    installed = checkout.calls
    assert checkout.run("serve", "--port", "80 80")[1:] == (
        "ran [-m]ran [paceline.launcher.start]ran [serve]ran [--port]ran [80 80]ran [1]\n",
        "",
    )
    assert checkout.calls == installed


def test_two_first_runs_at_once_set_up_once(checkout: Checkout) -> None:
    processes = [checkout.start("setup") for _ in range(3)]
    assert [process.wait(timeout=240) for process in processes] == [0, 0, 0]
    assert len(checkout.calls) == 2


@pytest.mark.parametrize("changed", ["pyproject.toml", ".ci/constraints.txt"])
def test_other_requirements_set_up_again(checkout: Checkout, changed: str) -> None:
    checkout.run("setup")
    with (checkout.root / changed).open("a") as file:
        file.write("# another requirement\n")
    checkout.run("setup")
    assert len(checkout.calls) == 4
    checkout.run("setup")
    assert len(checkout.calls) == 4


def test_a_moved_checkout_sets_up_again(checkout: Checkout) -> None:
    checkout.run("setup")
    moved = Checkout(checkout.root.rename(checkout.root.with_name("moved")), checkout.machine)
    assert moved.run("setup")[0] == 0
    assert len(moved.calls) == 4


def test_a_failed_set_up_shows_why_and_is_tried_again(checkout: Checkout) -> None:
    code, output, errors = checkout.run("generate", "hi", PIP_FAILS_ON="[dev]")
    assert (code, output) == (1, "")
    assert "pip's own words" in errors
    assert f"the whole output is in {checkout.root}/.venv/setup.log" in errors
    assert checkout.run("generate", "hi")[0] == 0
    assert len(checkout.calls) == 4


def test_without_pytorchs_index_the_configured_one_is_used(checkout: Checkout) -> None:
    assert checkout.run("setup", PIP_FAILS_ON="download.pytorch.org")[0] == 0
    assert checkout.calls[1].endswith("constraints.txt torch")


def test_a_gpu_takes_torch_from_the_configured_index(checkout: Checkout) -> None:
    tool = checkout.machine / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    checkout.run("setup")
    assert checkout.calls[0].endswith("constraints.txt torch")


def test_an_old_python_is_refused(checkout: Checkout) -> None:
    code, _, errors = checkout.run("setup", TOO_OLD="1")
    assert code == 1
    assert errors.splitlines()[-1].startswith("launch.sh: needs Python 3.11 or newer")


def test_a_link_to_the_script_finds_its_folder(checkout: Checkout) -> None:
    link = checkout.machine / "paceline"
    link.symlink_to(checkout.root / "launch.sh")
    assert checkout.run("setup", script=link)[0] == 0
    assert (checkout.root / ".venv" / "setup.stamp").exists()


def test_benchmarks_run_under_the_same_start(checkout: Checkout) -> None:
    output = checkout.run("bench", "decode", "--tp", "2")[1]
    script = checkout.root / "benchmarks" / "decode.py"
    start = "ran [-m]ran [paceline.launcher.start]"
    assert output == f"{start}ran [--script]ran [{script}]ran [--tp]ran [2]ran [1]\n"


def test_bench_serve_is_a_command_of_the_launcher(checkout: Checkout) -> None:
    output = checkout.run("bench", "serve", "--rate", "1")[1]
    start = "ran [-m]ran [paceline.launcher.start]"
    assert output == f"{start}ran [bench]ran [serve]ran [--rate]ran [1]ran [1]\n"


@pytest.mark.parametrize("name", [[], ["nothing"], ["../launch"], ["timing"]])
def test_an_unknown_benchmark_names_the_known(checkout: Checkout, name: list[str]) -> None:
    code, _, errors = checkout.run("bench", *name)
    assert code == 1
    assert errors.splitlines()[-1] == "launch.sh: bench needs serve, or the name of a benchmark: decode"


def test_help_needs_no_set_up(checkout: Checkout) -> None:
    code, output, _ = checkout.run("--help")
    assert (code, output.splitlines()[0]) == (0, "Usage: ./launch.sh [COMMAND] [ARGUMENT …]")
    assert checkout.calls == []


def test_a_given_interpreter_is_used_as_it_is(checkout: Checkout) -> None:
    code, output, _ = checkout.run("generate", "--help", PACELINE_PYTHON=sys.executable)
    assert (code, output.split()[:3]) == (0, ["usage:", "paceline", "generate"])
    assert not (checkout.root / ".venv").exists()


def test_a_given_interpreter_without_paceline_is_refused(checkout: Checkout) -> None:
    python = checkout.machine / "other python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    code, _, errors = checkout.run("serve", PACELINE_PYTHON=str(python))
    assert code == 1
    assert errors.startswith(f"launch.sh: {python} has no paceline; run: {python} -m pip install")
    assert "not an interpreter" in checkout.run("serve", PACELINE_PYTHON=os.devnull + "/python")[2]
