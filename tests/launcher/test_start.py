"""Ranks start in torchrun's environment, end together, and leave one exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from paceline.coordinator.errors import InputError
from paceline.launcher.serving.children import DRAIN_SECONDS
from paceline.launcher.start import (
    RANK_BYTES,
    SHUTDOWN_SECONDS,
    check_memory,
    number_of_ranks,
    shutdown_seconds,
    split_script,
    visible_gpus,
)

ROOT = Path(__file__).parents[2]

Start = Callable[..., subprocess.Popen[str]]


STARTER = ["-m", "paceline.launcher.start"]
HASTY_STARTER = [
    "-c",
    "import sys; from torch.distributed.elastic.multiprocessing.api import PContext;"
    "PContext.close.__defaults__ = None, 1; from paceline.launcher.start import main; sys.exit(main())",
]
"""In which torchrun waits a second, instead of half a minute, until it kills a rank that does not end."""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts two ranks of a piece of Python, in which `rank` is the rank's number."""

    def run(code: str, starter: Sequence[str] = STARTER) -> subprocess.Popen[str]:
        prelude = "import os, pathlib, signal, sys, time\nrank = int(os.environ['RANK'])\n"
        script = tmp_path / "script.py"
        script.write_text(prelude + textwrap.dedent(code))
        return subprocess.Popen(
            [sys.executable, *starter, "--script", str(script), "--tp", "2"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (["generate", "hi", "--tp", "3"], 3),
        (["--tp=2", "serve"], 2),
        (["serve", "--tensor-parallel-size", "4", "--port", "1"], 4),
        (["serve"], 8),
        (["generate", "hi"], 8),
        (["generate", "hi", "--device", "cpu"], 1),
        (["generate", "hi", "--tpx", "3"], 8),
        (["generate"], 8),
        (["generate", "--help"], 1),
        (["--script", "decode.py"], 1),
        (["--script", "decode.py", "--rounds", "3"], 1),
        (["--script", "decode.py", "generate"], 1),
        (["--script", "decode.py", "--tp", "4"], 4),
        (["chat", "--tp", "2"], 1),
        (["batch", "in", "out", "--tp=2"], 1),
        (["bench", "serve", "--rate", "2"], 1),
        (["no-such-command"], 1),
        ([], 1),
    ],
)
def test_number_of_ranks(arguments: list[str], ranks: int) -> None:
    assert number_of_ranks(arguments, lambda: 8) == ranks


def test_a_benchmark_with_arguments_runs_once_whatever_gpus_there_are(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\necho 'GPU 1: NVIDIA H200'\n")
    tool.chmod(0o755)
    script = tmp_path / "benchmark.py"
    script.write_text("import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:])")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "0,1"}
    command = [sys.executable, "-m", "paceline.launcher.start", "--script", str(script), "--rounds", "3"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (result.stdout, result.stderr) == ("1 ['--rounds', '3']\n", "")


def test_the_usage_of_launch_sh_names_commands_that_there_are() -> None:
    usage = subprocess.run([ROOT / "launch.sh", "--help"], capture_output=True, text=True, check=True).stdout
    commands = set(re.findall(r"^  ([a-z]+) ", usage, re.MULTILINE)) - {"test", "bench", "setup"}
    assert {"generate", "serve", "chat", "batch", "verify"} <= commands
    for command in commands:
        result = subprocess.run([sys.executable, "-m", "paceline.launcher", command, "--help"], capture_output=True)
        assert result.returncode == 0, command


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        (["generate", "hi"], SHUTDOWN_SECONDS),
        (["serve"], SHUTDOWN_SECONDS + DRAIN_SECONDS),
        (["serve", "model", "--drain-timeout", "2.5"], SHUTDOWN_SECONDS + 2.5),
        (["serve", "--drain-timeout", "nan"], SHUTDOWN_SECONDS),
        (["serve", "--drain-timeout", "soon"], SHUTDOWN_SECONDS),
        (["serve", "--drain-timeout"], SHUTDOWN_SECONDS),
    ],
)
def test_ranks_that_serve_get_time_to_drain(arguments: list[str], seconds: float) -> None:
    assert shutdown_seconds(arguments) == seconds


def test_one_rank_without_a_gpu() -> None:
    assert number_of_ranks(["generate", "hi"], lambda: 0) == 1


@pytest.mark.parametrize("value", [["--tp", "0"], ["--tp", "-1"], ["--tp=x"], ["--tp", "1_0"], ["--tp=2.0"], ["--tp"]])
def test_a_bad_tp_ends_in_one_line_before_any_rank(value: list[str]) -> None:
    command = [sys.executable, "-m", "paceline.launcher.start", "generate", "hi", *value]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("paceline: --tp")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_more_ranks_than_memory_are_refused_before_any_is_started() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "paceline.launcher.start", "generate", "hi", "--tp", "100000000"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("paceline: 100000000 ranks would take some 29296875 GiB")
    check_memory(8, 8 * RANK_BYTES)
    with pytest.raises(InputError, match="lower --tp"):
        check_memory(9, 8 * RANK_BYTES)


def test_script_replaces_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "my benchmark.py"
    script.write_text("")
    assert split_script(["--script", str(script), "--tp", "2"]) == ([str(script)], ["--tp", "2"])
    assert split_script(["generate", "--script"]) == (["-m", "paceline.launcher"], ["generate", "--script"])
    with pytest.raises(InputError, match="Python file"):
        split_script(["--script", str(tmp_path / "missing.py")])


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("3,1", 2), ("GPU-aaaa", 1), ("MIG-aaaa,MIG-bbbb", 2), ("", 0), ("-1", 0), ("1,-1,0", 1)],
)
def test_gpus_are_counted_by_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nfor i in 0 1 2; do echo \"GPU $i: NVIDIA H200 (UUID: GPU-$i)\"; done\necho '  MIG 1g'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == count


def test_no_gpu_without_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert visible_gpus() == 0


def test_two_engines_at_once_each_meet_their_own_ranks(tmp_path: Path) -> None:
    script = tmp_path / "ranks meet.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, torch, torch.distributed as dist
            dist.init_process_group("gloo")
            values = torch.tensor([float(sys.argv[1]) * 10 ** dist.get_rank()])
            dist.all_reduce(values)
            line = f"{os.environ['LOCAL_RANK']} {os.environ['LOCAL_WORLD_SIZE']} {values.item()}\\n"
            os.write(1, line.encode())
            dist.destroy_process_group()
            """
        )
    )
    command = [sys.executable, "-m", "paceline.launcher.start", "--script", str(script)]
    engines = [
        subprocess.Popen([*command, value, "--tp", "2"], stdout=subprocess.PIPE, text=True) for value in ("1", "5")
    ]
    outputs = [engine.communicate(timeout=240)[0] for engine in engines]
    assert [engine.returncode for engine in engines] == [0, 0]
    assert sorted(outputs[0].splitlines()) == ["0 2 11.0", "1 2 11.0"]
    assert sorted(outputs[1].splitlines()) == ["0 2 55.0", "1 2 55.0"]


def test_one_rank_runs_alone_in_this_process(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import os, sys; print(os.getpid(), os.environ['WORLD_SIZE'], sys.argv[1:]); sys.exit(5)")
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.launcher.start", "--script", str(script), "--tp", "1"],
        env={**os.environ, "WORLD_SIZE": "7", "RANK": "6"},
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate(timeout=240)
    assert output == f"{process.pid} 1 ['--tp', '1']\n"
    assert process.returncode == 5


def test_all_ranks_done_is_success(start: Start) -> None:
    process = start("time.sleep(0.2 * rank)")
    assert process.communicate(timeout=240) == ("", "")
    assert process.returncode == 0


def test_the_failed_rank_gives_the_code_and_the_only_words(start: Start) -> None:
    process = start(
        """
        if rank == 1:
            print("rank 1 says why", file=sys.stderr)
            sys.exit(7)
        time.sleep(600)
        """
    )
    _, errors = process.communicate(timeout=240)
    assert errors == "rank 1 says why\n"
    assert process.returncode == 7


def test_a_killed_rank_is_named(start: Start) -> None:
    process = start("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)")
    _, errors = process.communicate(timeout=240)
    assert errors == "paceline: rank 1 was ended by SIGKILL; was the memory full?\n"
    assert process.returncode == 128 + signal.SIGKILL


def test_a_frozen_rank_does_not_keep_the_others(start: Start) -> None:
    process = start(
        """
        if rank == 1:
            pathlib.Path("pid.new").write_text(str(os.getpid()))
            os.rename("pid.new", "pid")
            os.kill(os.getpid(), signal.SIGSTOP)
        while not os.path.exists("pid"):
            time.sleep(0.01)
        frozen = pathlib.Path("/proc", pathlib.Path("pid").read_text(), "stat")
        while frozen.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        sys.exit(9)
        """,
        HASTY_STARTER,
    )
    process.communicate(timeout=240)
    assert process.returncode == 9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(start: Start, number: signal.Signals) -> None:
    process = start(
        """
        pathlib.Path(f"pid{rank}.new").write_text(str(os.getpid()))
        os.rename(f"pid{rank}.new", f"pid{rank}")
        os.write(1, b"ready\\n")
        time.sleep(600)
        """
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + number
    assert "launcher/start.py" not in errors, "no traceback of the starter"
    folder = Path(process.args[4]).parent  # type: ignore[index]
    for rank in range(2):
        assert not Path(f"/proc/{(folder / f'pid{rank}').read_text()}").exists()
