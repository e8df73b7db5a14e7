"""Starts the ranks of one engine on this host: `python -m paceline.launcher.start [--script FILE] [ARGUMENT …]`.

It hands over to `torchrun --standalone --nproc-per-node N -m paceline.launcher ARGUMENT …`, N being --tp; without it
`generate` and `serve` take a rank for each GPU, and all else takes one. torchrun's own code runs in this process, so
that a failed rank, which has said in one line what to change, is not followed by torchrun's report and traceback, and
its exit code becomes ours.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.coordinator.errors import InputError
from paceline.launcher.serving.children import DRAIN_SECONDS, DrainReceipt
from paceline.launcher.tp_range import is_tp_range

SHUTDOWN_SECONDS = 10
"""How long ranks may take to end once a signal came; then torchrun kills them, as 30 s after one of them has failed."""
RANK_PER_GPU_COMMANDS = ("generate", "serve")
"""Commands that take all GPUs there are unless --tp says otherwise: those that run the engine to answer somebody."""
CLIENT_COMMANDS = ("chat", "batch", "bench")
"""Commands that are no ranks themselves: one that wants an engine of its own starts `serve` for it."""
RANK_BYTES = 300 << 20
"""Host memory that a rank takes before it has loaded anything: Python, torch and what they map."""
USAGE_ERROR = 2
"""Exit code for arguments that cannot be carried out."""


def main() -> int:
    """Start the ranks and watch them; the exit code is that of the first rank to fail, or 0."""
    try:
        program, arguments = split_script(sys.argv[1:])
        ranks = number_of_ranks(sys.argv[1:], visible_gpus)
        check_memory(ranks, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except InputError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return USAGE_ERROR
    if ranks == 1:
        # One rank needs no rendezvous and nobody to watch it: it takes this process's place.
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.execve(sys.executable, [sys.executable, "-u", *program, *arguments], {**os.environ, **alone})
    return run_ranks([*program, *arguments], ranks, shutdown_seconds(sys.argv[1:]))


def split_script(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What Python is to run, and the arguments it is to get: a leading --script FILE replaces the launcher.

    Raises InputError where the file is missing.
    """
    if list(arguments[:1]) != ["--script"]:
        return ["-m", "paceline.launcher"], list(arguments)
    if len(arguments) < 2 or not Path(arguments[1]).is_file():
        raise InputError("--script must be followed by a Python file")
    return [arguments[1]], list(arguments[2:])


def number_of_ranks(arguments: Sequence[str], count_gpus: Callable[[], int]) -> int:
    """--tp (--tensor-parallel-size) where it is given anywhere; else 1, or for those commands a rank for each GPU.

    arguments: those of the program, a leading command or --script FILE included. Help, and --device cpu, take one rank
    unless --tp is given; `verify` takes one for several numbers or the config alone, and CLIENT_COMMANDS always do.
    Raises InputError where --tp is no positive whole number.
    """
    command = arguments[0] if arguments else ""
    if command in CLIENT_COMMANDS:
        return 1
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tp", "--tensor-parallel-size", dest="tp")
    parser.add_argument("--device")
    parser.add_argument("--config-only", action="store_true")
    parser.add_argument("-h", "--help", "--version", dest="information", action="store_true")
    try:
        options, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise InputError(f"{error.argument_name} must be followed by a value") from error
    if command == "verify" and (options.config_only or is_tp_range(options.tp or "")):
        return 1
    if options.tp is not None:
        # Not int() alone, which also takes "1_0" and " 2".
        if not (options.tp.isascii() and options.tp.isdigit() and int(options.tp) > 0):
            raise InputError(f"--tp must be a whole number of at least 1, got {options.tp!r}")
        return int(options.tp)
    if command in RANK_PER_GPU_COMMANDS and not options.information and options.device != "cpu":
        return max(1, count_gpus())
    return 1


def check_memory(ranks: int, memory: int) -> None:
    """Raise InputError where so many ranks cannot even start in so many bytes; trying would take the machine down."""
    needed = ranks * RANK_BYTES
    if needed > memory:
        raise InputError(
            f"{ranks} ranks would take some {needed / 2**30:.0f} GiB before they load anything, and this machine has "
            f"{memory / 2**30:.0f}; lower --tp"
        )


def shutdown_seconds(arguments: Sequence[str]) -> float:
    """How long ranks may take to end: `serve` may have requests to finish first.

    A --drain-timeout that makes no sense is left to the ranks, which refuse it.
    """
    if arguments[:1] != ["serve"]:
        return SHUTDOWN_SECONDS
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--drain-timeout", type=float, default=DRAIN_SECONDS)
    try:
        options, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError:
        return SHUTDOWN_SECONDS
    drain_seconds: float = options.drain_timeout
    return SHUTDOWN_SECONDS + (drain_seconds if 0 <= drain_seconds < math.inf else 0)


def visible_gpus() -> int:
    """How many GPUs a process started here would see.

    The entries of CUDA_VISIBLE_DEVICES may be indices in any order, UUIDs or MIG names, so they are counted and not
    read; -1 hides all that follow it, as CUDA has it.
    """
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return 0
    listing = subprocess.run([nvidia_smi, "--list-gpus"], capture_output=True, text=True)
    installed = 0 if listing.returncode else sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or installed == 0:
        return installed
    entries = [entry.strip() for entry in visible.split(",")]
    hidden_from = entries.index("-1") if "-1" in entries else len(entries)
    return sum(bool(entry) for entry in entries[:hidden_from])


def run_ranks(arguments: Sequence[str], ranks: int, seconds_to_end: float = SHUTDOWN_SECONDS) -> int:
    """Run torchrun with these arguments on one host; returns the first failed rank's exit code, or 0.

    A rank that signal n ended counts as 128 + n, as in a shell, and so does a signal n that came here, unless rank 0
    has carried it out. seconds_to_end: for the ranks once a signal came.
    """
    # Only here: a single rank's start does not wait for this process to import torch.
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(seconds_to_end)))
    receipt = DrainReceipt()
    try:
        torchrun.run(torchrun.parse_args(["--standalone", "--nproc-per-node", str(ranks), *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        number = signal.Signals(-failure.exitcode)
        hint = "; was the memory full?" if number is signal.SIGKILL else ""
        print(f"paceline: rank {rank} was ended by {number.name}{hint}", file=sys.stderr)
        return 128 + number
    except SignalException as error:
        return 0 if receipt.came() else 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
