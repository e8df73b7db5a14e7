"""What the HTTP process sustains and what it adds, before an engine that costs nothing.

    ./launch.sh bench door [--write]

The HTTP process is the real one, over the real link; the engine is a stub in this process, the clients are raw sockets
in two others. Each load runs several times and the median is shown. Costs are the HTTP process' own CPU time, which a
busy machine changes less than it does the clock; a token's are shown with its share of the requests, and beside them.
The time to first token is what a client waits for one token that the stub gives at once, so all of it is the door's
(and, on few cores, waiting for a core).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import door_clients
import report
import zmq
from door_stub import PROBE_PRIORITY, StubEngine

from paceline.launcher.default_model import default_model_path
from paceline.launcher.serving.children import Endpoint
from paceline.launcher.serving.engine_api import EngineInfo
from paceline.launcher.serving.listener import listen
from paceline.launcher.serving.settings import ServerSettings
from paceline.launcher.tokenizer import Tokenizer

FRONT_MODULE = "paceline.launcher.serving.front_process"
TICKS = os.sysconf("SC_CLK_TCK")
MESSAGES = [{"role": "user", "content": "Tell me of the sea, of ships, and of those who wait on the shore. " * 4}]
ANSWER = (
    "The sea, said the old pilot, isn't one thing: it is 12 things at once. Ships know this; that's why they creak.\n\n"
    "- Those on the shore count the days (über 300, meistens), and the lamps.\n"
    "- Die Möwen zählen nichts. 海は広い。They wait anyway, don't they?\n"
)


@dataclass(frozen=True)
class Load:
    """Streams that run at the same time, each of `tokens` tokens at `rate` tokens a second."""

    streams: int
    rate: float
    tokens: int
    probes: int

    @property
    def offered(self) -> float:
        """Tokens a second that the stub gives out."""
        return self.streams * self.rate


LOADS = (
    Load(streams=64, rate=50, tokens=150, probes=40),
    Load(streams=1000, rate=20, tokens=200, probes=40),
    Load(streams=1000, rate=200, tokens=1000, probes=20),
)


class Front:
    """The HTTP process, with the stub behind it and the clients before it."""

    def __init__(self, pid: int, stub: StubEngine, crowd: Connection, probe: Connection) -> None:
        self.stub = stub
        self.crowd = crowd
        self.probe = probe
        self._folder = Path(f"/proc/{pid}")

    def cpu_seconds(self) -> float:
        """User and system time of the HTTP process so far, all threads."""
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self) -> int:
        """Resident bytes."""
        return int((self._folder / "statm").read_text().split()[1]) * resource.getpagesize()

    def open_files(self) -> int:
        """How many files and sockets it holds."""
        return len(os.listdir(self._folder / "fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of a few streams, to see that it runs")
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    loads = (Load(streams=8, rate=50, tokens=50, probes=5),) if arguments.quick else LOADS
    figures: dict[str, Any] = {"loads": []}
    with running_front() as front:
        idle = idle_door(front, 20 if arguments.quick else 300)
        figures["idle"] = idle
        print(
            f"idle: first token after {1000 * idle['first_token_p50_s']:.2f} ms (p99 "
            f"{1000 * idle['first_token_p99_s']:.2f}), {1e6 * idle['cpu_s_per_request']:.0f} us of CPU a request, "
            f"{idle['memory'] / 2**20:.0f} MiB"
        )
        print(
            "streams  offered tok/s  sustained  us CPU a token  beside requests  tok a write  "
            "first token p50, p99 ms     MiB  files"
        )
        for load in loads:
            measured = [under_load(front, load) for _ in range(rounds)]
            row = {name: statistics.median(each[name] for each in measured) for name in measured[0]}
            requests = (load.streams + load.probes) * idle["cpu_s_per_request"]
            row["streaming_us_per_token"] = row["cpu_us_per_token"] - 1e6 * requests / (load.streams * load.tokens)
            figures["loads"].append({**dataclasses.asdict(load), **row})
            print(
                f"{load.streams:7}  {load.offered:13,.0f}  {row['tokens_per_s']:9,.0f}  {row['cpu_us_per_token']:14.1f}"
                f"  {row['streaming_us_per_token']:15.1f}  {row['tokens_per_write']:11.1f}"
                f"  {1000 * row['first_token_p50_s']:12.2f}  {1000 * row['first_token_p99_s']:10.2f}"
                f"  {row['memory'] / 2**20:6.0f}  {row['open_files']:5.0f}"
            )
    if arguments.write:
        report.write("door", figures)


@contextmanager
def running_front() -> Iterator[Front]:
    """Everything started and, in the end, ended."""
    folder = default_model_path()
    tokenizer = Tokenizer(folder)
    info = EngineInfo(
        vocab_size=len(tokenizer.backend),
        max_model_len=8192,
        num_blocks=1 << 20,
        block_size=16,
        end_ids=tokenizer.end_ids,
        tensor_parallel_size=1,
        devices=("stub",),
    )
    spawn = multiprocessing.get_context("spawn")
    with Endpoint() as endpoint, zmq.Context() as context, context.socket(zmq.DEALER) as zmq_socket:
        zmq_socket.set_hwm(0)
        zmq_socket.linger = 1000
        zmq_socket.bind(endpoint.address)
        with listen("127.0.0.1", 0, None) as listener:
            port = listener.getsockname()[1]
            process = start_front(endpoint.address, listener.fileno(), folder)
        stub = StubEngine(zmq_socket, info, tokenizer.encode(ANSWER))
        pipes, clients = [], []
        for run in (door_clients.crowd, door_clients.probe):
            mine, theirs = spawn.Pipe()
            pipes.append(mine)
            clients.append(spawn.Process(target=run, args=(port, theirs), daemon=True))
            clients[-1].start()
        try:
            stub.start()
            if not stub.ready.wait(120):
                raise TimeoutError("the HTTP process did not start within two minutes")
            # What this process has loaded stays: to look through it again, 0.2 s, would have the stub stand still.
            gc.collect()
            gc.freeze()
            yield Front(process.pid, stub, pipes[0], pipes[1])
            for pipe in pipes:
                pipe.send(None)
        finally:
            stub.stop()
            stub.join(10)
            process.kill()
            process.wait()


def start_front(address: str, listener: int, folder: Path) -> subprocess.Popen[bytes]:
    """The HTTP process, started as `serve` starts it, but with its log lines thrown away."""
    settings = {
        "address": address,
        "listener": listener,
        "folder": str(folder),
        "server": dataclasses.asdict(ServerSettings(model_names=("stub",), max_queue=4096)),
        "ssl_certfile": None,
        "ssl_keyfile": None,
    }
    command = [sys.executable, "-m", FRONT_MODULE]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(listener,))
    assert process.stdin is not None
    process.stdin.write(json.dumps(settings).encode() + b"\n")
    process.stdin.flush()
    return process


def idle_door(front: Front, count: int) -> dict[str, float]:
    """What a single client waits for, and what a request costs."""
    body = {"messages": MESSAGES, "max_tokens": 1, "priority": PROBE_PRIORITY}
    for number in (20, count):  # the first requests warm it up
        before = front.cpu_seconds()
        front.probe.send((number, 0.002, body))
        waits = front.probe.recv()
    spent = front.cpu_seconds() - before
    return {**percentiles(waits), "cpu_s_per_request": spent / count, "memory": front.memory()}


def under_load(front: Front, load: Load) -> dict[str, float]:
    """One run of a load, with probes meanwhile."""
    front.stub.steps_per_second = load.rate
    front.stub.gather = load.streams
    files: list[int] = []
    over = threading.Event()
    watcher = threading.Thread(target=watch_files, args=(front, files, over))
    watcher.start()
    before = front.cpu_seconds()
    front.crowd.send((load.streams, {"messages": MESSAGES, "max_tokens": load.tokens}))
    time.sleep(0.5 * load.tokens / load.rate)
    body = {"messages": MESSAGES, "max_tokens": 1, "priority": PROBE_PRIORITY}
    front.probe.send((load.probes, 0.02, body))
    seen: door_clients.CrowdReport = front.crowd.recv()
    spent = front.cpu_seconds() - before
    waits = front.probe.recv()
    over.set()
    watcher.join()
    if seen.failed or seen.tokens != load.streams * load.tokens:
        raise RuntimeError(f"{seen.failed} streams of {load.streams} failed; {seen.tokens} tokens arrived")
    return {
        "tokens_per_s": seen.tokens / seen.seconds,
        "cpu_us_per_token": 1e6 * spent / seen.tokens,
        "tokens_per_write": seen.tokens / seen.writes,
        **percentiles(waits),
        "memory": front.memory(),
        "open_files": max(files),
    }


def watch_files(front: Front, files: list[int], over: threading.Event) -> None:
    """Note the number of open files a few times a second."""
    while not over.wait(0.25):
        files.append(front.open_files())


def percentiles(waits: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    ordered = sorted(waits)
    return {
        "first_token_p50_s": statistics.median(ordered),
        "first_token_p99_s": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


if __name__ == "__main__":
    main()
