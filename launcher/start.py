"""Starts the ranks of one engine on this host: `python -m paceline.launcher.start [--script FILE] [ARGUMENT …]`.

Every rank runs `python -m paceline.launcher ARGUMENT …` (or the script) in the environment that
`torchrun --standalone --nproc-per-node N` would give it, N being --tp or the number of GPUs. Unlike torchrun it exits
with the code of the rank that failed and prints no traceback of its own, ends a frozen rank within seconds of another's
failure (torchrun: 30 s), and lets the ranks take as long as they need to finish their requests after a signal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from paceline.coordinator.errors import InputError

FAILURE_GRACE_S = 5.0
"""How long ranks may take to end once one of them has ended for bad, or at a second signal; then they are killed."""
POLL_S = 0.05
USAGE_ERROR = 2
"""Exit code for arguments that cannot be carried out."""


def main() -> int:
    """Start the ranks and watch them; the exit code is that of the first rank to fail, or 0."""
    try:
        program, arguments = split_script(sys.argv[1:])
        ranks = number_of_ranks(arguments, visible_gpus)
    except InputError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return USAGE_ERROR
    command = [sys.executable, "-u", *program, *arguments]
    if ranks == 1:
        # One rank needs nobody to watch it, and no rendezvous: it takes this process's place.
        os.execve(command[0], command, {**os.environ, **rank_environment(0, 1)})
    return run_ranks(command, ranks)


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
    """--tp (--tensor-parallel-size) where it is given anywhere, else a rank for each GPU, and 1 without one.

    Help, and --device cpu, take one rank. Raises InputError where --tp is no positive whole number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tp", "--tensor-parallel-size", dest="tp")
    parser.add_argument("--device")
    parser.add_argument("-h", "--help", "--version", dest="information", action="store_true")
    try:
        options, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise InputError(f"{error.argument_name} must be followed by a value") from error
    if options.tp is not None:
        # Not int() alone, which also takes "1_0" and " 2".
        if not (options.tp.isascii() and options.tp.isdigit() and int(options.tp) > 0):
            raise InputError(f"--tp must be a whole number of at least 1, got {options.tp!r}")
        return int(options.tp)
    if not arguments or options.information or options.device == "cpu":
        return 1
    return max(1, count_gpus())


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


def rank_environment(rank: int, ranks: int) -> dict[str, str]:
    """A rank's place among the ranks of this host, in torchrun's variables."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }


def run_ranks(command: Sequence[str], ranks: int) -> int:
    """Run the command once for each rank until all have ended; return the exit code."""
    # Only here: a single rank's start does not wait for this process to import torch.
    import torch.distributed as dist

    # This process keeps the rendezvous, so that its port is free by construction and two engines never meet.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // ranks)),
    }
    return RankWatch(command, [{**shared, **rank_environment(rank, ranks)} for rank in range(ranks)]).run()


class RankWatch:
    """The processes of all ranks, from their start to the end of the last."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        """environments: what each rank's environment has beside this process's own, in rank order."""
        self._command = list(command)
        self._environments = environments
        self._processes: list[subprocess.Popen[bytes]] = []
        self._signals = 0
        self._kill_at: float | None = None
        self._failed: tuple[int, int] | None = None

    def run(self) -> int:
        """Start the ranks, wait for all, and return the exit code. Signals are passed on to every rank."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._pass_on)
        for environment in self._environments:
            self._processes.append(
                # Its own session: an interrupt typed at the terminal reaches the ranks once, through this process.
                subprocess.Popen(self._command, env={**os.environ, **environment}, start_new_session=True)
            )
        if self._signals:
            self._send(signal.SIGTERM)  # to those that were not yet there when the signal came
        while any(process.poll() is None for process in self._processes):
            self._check()
            time.sleep(POLL_S)
        self._check()
        return self._exit_code()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """A first signal asks the ranks to finish; at a second they have FAILURE_GRACE_S left."""
        self._signals += 1
        if self._signals > 1:
            self._set_deadline()
        self._send(signal.Signals(number))

    def _check(self) -> None:
        """See which ranks have ended, and what follows for the others."""
        codes = [process.poll() for process in self._processes]
        failures = [(rank, code) for rank, code in enumerate(codes) if code]
        if failures and self._failed is None:
            # Where several ended since the last look, one that was killed is the cause of the others' errors.
            self._failed = min(failures, key=lambda failure: failure[1] > 0)
            self._set_deadline()
            self._send(signal.SIGTERM)
        if self._signals and any(code is not None for code in codes):
            self._set_deadline()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._send(signal.SIGKILL)

    def _set_deadline(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + FAILURE_GRACE_S

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _exit_code(self) -> int:
        """The first failed rank's code, as a shell has it: 128 + n for a rank that signal n ended."""
        if self._failed is None:
            return 0
        rank, code = self._failed
        if code > 0:
            return code
        if not self._signals:
            hint = "; was the memory full?" if -code == signal.SIGKILL else ""
            print(f"paceline: rank {rank} was ended by {signal.Signals(-code).name}{hint}", file=sys.stderr)
        return 128 - code


if __name__ == "__main__":
    sys.exit(main())
