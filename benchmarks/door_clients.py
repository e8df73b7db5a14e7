"""HTTP clients that cost little: raw sockets in a process of their own, and answers looked through as bytes."""

from __future__ import annotations

import json
import selectors
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

END = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class CrowdReport:
    """What the clients of one run saw, all together."""

    tokens: int
    """Of the usage that the streams end with."""
    writes: int
    """Pieces that the clients read: about the number of writes of the server."""
    seconds: float
    """From the first request to the end of the last stream."""
    failed: int
    """Streams that did not end as they should."""


def request(body: dict[str, Any]) -> bytes:
    """A streamed chat request on a connection that stays open."""
    content = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    lines = ("POST /v1/chat/completions HTTP/1.1", "host: localhost", "content-type: application/json")
    return "\r\n".join((*lines, f"content-length: {len(content)}", "", "")).encode() + content


def crowd(port: int, pipe: Connection) -> None:
    """A process that runs as many streams at once as the pipe tells it, again and again, until it is told None."""
    while (order := pipe.recv()) is not None:
        pipe.send(_run_streams(port, *order))


def _run_streams(port: int, streams: int, body: dict[str, Any]) -> CrowdReport:
    selector = selectors.DefaultSelector()
    tails: dict[socket.socket, bytes] = {}
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        tails[connection] = b""
        selector.register(connection, selectors.EVENT_READ)
    content = request(body)
    started = time.monotonic()
    for connection in tails:
        connection.sendall(content)
    tokens = writes = failed = 0
    while tails:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            data = connection.recv(1 << 18)
            writes += 1
            tail = tails[connection] = (tails[connection] + data)[-600:]
            if data and END not in tail:
                continue
            used = _completion_tokens(tail)
            tokens += used
            failed += used == 0
            selector.unregister(connection)
            connection.close()
            del tails[connection]
    return CrowdReport(tokens, writes, time.monotonic() - started, failed)


def _completion_tokens(tail: bytes) -> int:
    """Of the usage before a stream's end; 0 where there is none."""
    _, found, rest = tail.partition(b'"completion_tokens":')
    return int(rest.partition(b",")[0]) if found else 0


def probe(port: int, pipe: Connection) -> None:
    """A process that asks one thing after the other: for (count, pause, body) it sends back the seconds to each first
    token, on one connection."""
    while (order := pipe.recv()) is not None:
        count, pause, body = order
        content = request(body)
        waits = []
        with socket.create_connection(("127.0.0.1", port)) as connection:
            for _ in range(count):
                time.sleep(pause)
                started = time.monotonic()
                connection.sendall(content)
                data = _receive(connection)
                while b"data: " not in data:
                    data += _receive(connection)
                waits.append(time.monotonic() - started)
                while END not in data:
                    data += _receive(connection)
        pipe.send(waits)


def _receive(connection: socket.socket) -> bytes:
    if not (data := connection.recv(1 << 16)):
        raise ConnectionError("the HTTP process has closed a connection whose answer is not whole")
    return data
