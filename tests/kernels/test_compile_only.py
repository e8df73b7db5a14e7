"""Kernels that are compiled before their launches: where, which of them, and what becomes of those that cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import os
import signal
import sys
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from paceline.kernels.launch import compile_only, launch

HERE = os.getpid()


class Hopper:
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
        load_binary=lambda *arguments: ("module", "function", 0, 0, 1024),
    )
    launcher_cls = get_current_device = get_current_stream = lambda *arguments: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)


def note(*, src, cache_hit, **_):
    is_here = os.getpid() == HERE
    words = "here" if is_here else "elsewhere", "found" if cache_hit else "compiled"
    os.write(notes, (" ".join(words) + "\\n").encode())
    if dies and not is_here:
        os.kill(os.getpid(), signal.SIGKILL)


@triton.jit
def kernel(x_ptr, NUMBER: tl.constexpr):
    tl.static_assert(NUMBER != 13)
    tl.store(x_ptr, NUMBER)


def compile_numbers(*numbers, num_processes=2):
    with compile_only(torch.device("cuda", 0), num_processes, lambda: print("meanwhile")):
        for number in numbers:
            launch(kernel, (1,), torch.empty(4, device="cuda"), NUMBER=number)
        if fails:
            raise ValueError("no")


def print_loaded():
    print(sorted(compiled.module for compiled in kernel.device_caches[0][0].values() if compiled is not None))


driver.set_active(Hopper())
torch.cuda.set_device = lambda device: None
triton.knobs.compilation.listener = note
notes = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
dies = fails = False
"""


class Runs:
    """Programs that share a cache, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, program: str) -> list[str]:
        """The lines that a program printed."""
        script = self._folder / "program.py"
        script.write_text(BEGIN + program)
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(self._folder / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
        command = [sys.executable, str(script), str(self._folder / "notes")]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (run.returncode, run.stderr) == (0, "")
        return run.stdout.splitlines()

    def notes(self) -> list[str]:
        """What was noted of kernels since this was last asked: where each was compiled or found in the cache."""
        path = self._folder / "notes"
        noted = sorted(path.read_text().splitlines())
        path.unlink()
        return noted


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


FOUR = """
compile_numbers(1, 2, 3, 4)
print_loaded()
"""
FOUR_LOADED = "['module', 'module', 'module', 'module']"


def test_other_processes_compile_and_this_one_loads(runs: Runs) -> None:
    assert runs.run(FOUR) == ["meanwhile", FOUR_LOADED]
    assert runs.notes() == ["elsewhere compiled"] * 4 + ["here found"] * 4


def test_what_the_cache_has_is_loaded_and_nothing_forked(runs: Runs) -> None:
    runs.run(FOUR)
    runs.notes()
    assert runs.run(FOUR) == [FOUR_LOADED]
    assert runs.notes() == ["here found"] * 4


def test_only_what_the_cache_lacks_is_compiled(runs: Runs) -> None:
    runs.run(FOUR)
    runs.notes()
    assert runs.run("compile_numbers(1, 2, 3, 4, 5, 6, 7)") == ["meanwhile"]
    assert runs.notes() == ["elsewhere compiled"] * 3 + ["here found"] * 7


@pytest.mark.parametrize("arguments", ["1, 2", "1, 2, 3, num_processes=1"])
def test_a_few_kernels_or_one_process_are_not_worth_a_fork(arguments: str, runs: Runs) -> None:
    assert runs.run(f"compile_numbers({arguments})") == []
    assert set(runs.notes()) == {"here compiled"}


def test_what_does_not_compile_is_an_error_each_time_and_the_others_are_loaded(runs: Runs) -> None:
    program = """
for _ in range(2):
    try:
        compile_numbers(1, 2, 13, 4, 5)
    except triton.CompilationError as error:
        print("static_assert(NUMBER != 13)" in str(error))
print_loaded()
"""
    assert runs.run(program) == ["meanwhile", "True", "True", FOUR_LOADED]


def test_what_processes_leave_as_they_die_is_compiled_here(runs: Runs) -> None:
    assert runs.run("dies = True" + FOUR) == ["meanwhile", FOUR_LOADED]
    assert runs.notes() == ["elsewhere compiled"] * 2 + ["here compiled"] * 2 + ["here found"] * 2


def test_an_error_of_the_launches_is_raised_and_nothing_waited_for(runs: Runs) -> None:
    program = """
fails = True
try:
    compile_numbers(1, 2, 3, 4)
except ValueError as error:
    print(error)
fails = False
"""
    assert runs.run(program + FOUR) == ["no", "meanwhile", FOUR_LOADED]


def test_an_error_meanwhile_is_raised_and_the_processes_end(runs: Runs) -> None:
    program = """
def fail():
    raise ValueError("no")

try:
    with compile_only(torch.device("cuda", 0), 2, fail):
        for number in range(20, 30):
            launch(kernel, (1,), torch.empty(4, device="cuda"), NUMBER=number)
except ValueError as error:
    print(error, repr(open(f"/proc/self/task/{HERE}/children").read()))
"""
    assert runs.run(program) == ["no ''"]
