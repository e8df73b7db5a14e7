"""Clients that leave a real server at random, for as long as wanted: what do they leave behind?

    ./launch.sh bench soak [--seconds 60] [--tp 2] [--model FOLDER] [--write]

64 clients on raw sockets ask for answers, streamed or whole, with one choice or two, and leave before the first byte,
in the middle, by closing only their own side, or at the end. Then the server must hold no answer, no used block and no
more files than before. How soon a leaver's blocks are free is measured before, on the idle server. Ends with status 1
where anything was left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import report

CLIENTS = 64
LEAVERS = 30
PROMPT_WORDS = 60
SETTLE_SECONDS = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--model", help="folder of a checkpoint (default: the default model)")
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results")
    arguments = parser.parse_args()
    with running_server(arguments.model, arguments.tp) as (port, front):
        figures = asyncio.run(soak(port, front, arguments.seconds))
    figures = {"seconds": arguments.seconds, "tp": arguments.tp, **figures}
    for name, value in figures.items():
        print(f"{name:24} {value}")
    if arguments.write:
        report.write("soak", figures)
    if figures["left_behind"]:
        sys.exit(1)


@contextmanager
def running_server(model: str | None, tp: int) -> Iterator[tuple[int, int]]:
    """A server's port, and the process id of its HTTP process."""
    command = [sys.executable, "-m", "paceline.launcher.start", "serve", *([model] if model else []), "--port", "0"]
    options = ["--device", "cpu", "--tp", str(tp), "--num-blocks", "512", "--max-num-seqs", "48"]
    process = subprocess.Popen(
        [*command, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("paceline: serving "):
            raise RuntimeError("the server did not start; run `serve` with the same options to see why")
        port = int(line.rsplit(":", 1)[1])
        yield port, front_of(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def front_of(ancestor: int) -> int:
    """The HTTP process among the processes that this one started, directly or not."""
    for pid in descendants(ancestor):
        if b"front_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise RuntimeError("there is no HTTP process")


def descendants(pid: int) -> Iterator[int]:
    """This process, its children, and theirs."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from descendants(int(child))


async def soak(port: int, front: int, seconds: float) -> dict[str, Any]:
    """All of it, on a server that nobody else uses."""
    await Visitor(port, random.Random(0)).finish({"prompt": [1, 2, 3], "max_tokens": 2})  # warms it up
    blocks = sum((await load(port))["cache_blocks"].values())
    files = len(os.listdir(f"/proc/{front}/fd"))
    waits = [await leave(port) for _ in range(LEAVERS)]
    until = time.monotonic() + seconds
    counts = sum(await asyncio.gather(*(visits(port, number, until) for number in range(CLIENTS))), Counter())
    settled = time.monotonic() + SETTLE_SECONDS
    while left := await what_is_left(port, front, blocks, files):
        if time.monotonic() > settled:
            break
        await asyncio.sleep(0.05)
    return {
        "requests": sum(counts.values()),
        **{f"requests {kind}": count for kind, count in sorted(counts.items())},
        "blocks_free_after_p50_ms": round(1000 * statistics.median(waits), 1),
        "blocks_free_after_max_ms": round(1000 * max(waits), 1),
        "left_behind": left,
    }


async def what_is_left(port: int, front: int, blocks: int, files: int) -> dict[str, int]:
    """What an idle server should not hold; empty where all is well."""
    now = await load(port)
    cache = now["cache_blocks"]
    found = {name: now[name] for name in ("accepted", "running", "waiting")}
    found["used blocks"] = cache["used"]
    found["lost blocks"] = blocks - cache["free"] - cache["cached"] - cache["used"]
    found["open files"] = len(os.listdir(f"/proc/{front}/fd")) - files
    return {name: count for name, count in found.items() if count}


async def leave(port: int) -> float:
    """Seconds from a client's leaving its stream, alone on the server, until no block is in use."""
    visitor = Visitor(port, random.Random(0))
    await visitor.ask({"prompt": list(range(40)), "max_tokens": 400, "n": 4, "ignore_eos": True, "stream": True})
    await visitor.reader.readuntil(b"data: ")
    left = time.monotonic()
    visitor.writer.close()
    while (await load(port))["cache_blocks"]["used"]:
        pass
    return time.monotonic() - left


async def load(port: int) -> dict[str, Any]:
    """/v1/load."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v1/load HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    content: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return content


async def visits(port: int, number: int, until: float) -> Counter[str]:
    """One client after the other, each leaving in its own way: how many left how."""
    rng = random.Random(number)
    counts: Counter[str] = Counter()
    while time.monotonic() < until:
        visitor = Visitor(port, rng)
        kind = rng.choice(("finished", "left at once", "left in between", "closed their side", "left while waiting"))
        await visitor.visit(kind)
        counts[kind] += 1
    return counts


class Visitor:
    """One connection with one request."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port = port
        self._rng = rng

    async def ask(self, body: dict[str, Any]) -> None:
        """Send a request."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        content = json.dumps(body).encode()
        lines = (
            "POST /v1/completions HTTP/1.1",
            "host: localhost",
            "content-type: application/json",
            "connection: close",
        )
        self.writer.write("\r\n".join((*lines, f"content-length: {len(content)}", "", "")).encode() + content)

    async def finish(self, body: dict[str, Any]) -> None:
        """Ask, and read the answer to its end. Raises RuntimeError where it is no answer."""
        await self.ask(body)
        answer = await self.reader.read()
        self.writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {answer[:300]!r}")

    async def visit(self, kind: str) -> None:
        """Ask for something, and leave in this way."""
        rng = self._rng
        length = rng.randint(1, PROMPT_WORDS)
        body = {
            "prompt": [rng.choice((5, 6, 7)) for _ in range(length)],
            "max_tokens": rng.randint(1, 12) if kind == "finished" else 400,
            "n": rng.choice((1, 1, 2)),
            "ignore_eos": True,
            "logprobs": 0,  # so that every token is an event, whether it has a text or not
            "stream": kind == "left in between" or rng.random() < 0.5,
        }
        if kind == "finished":
            await self.finish(body)
            return
        await self.ask(body)
        match kind:
            case "left in between":
                for _ in range(rng.choice((1, 3, 10))):
                    await self.reader.readuntil(b"data: ")
            case "closed their side":
                self.writer.write_eof()
                await self.reader.read()
            case "left while waiting":
                await asyncio.sleep(rng.uniform(0, 0.3))
        self.writer.close()


if __name__ == "__main__":
    main()
