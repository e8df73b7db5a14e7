"""Field reports, to the letter, against one server of two ranks in processes of their own."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

PROMPT = [1, 2, 3]
VOCAB = 256
NUM_BLOCKS = 2000
WISH = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "logprobs": 0}
"""Without log-probabilities a model without a tokenizer has nothing to say in most chunks."""


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any], tiny: Callable[..., Any]) -> Iterator[Any]:
    """In the end it has ended well, and its log has one line for each request, however that ended, and few others."""
    folder = str(tiny("llama", max_position_embeddings=8192).folder)
    made = serve_all("--num-blocks", str(NUM_BLOCKS), "--max-num-seqs", "128", model=folder, tp=2).wait_ready()
    yield made
    answers = 'paceline_http_responses_total{path="/v1/completions"'
    counted = sum(value for name, value in numbers(made).items() if name.startswith(answers))
    made.process.send_signal(signal.SIGTERM)
    assert made.end() == (0, "")
    assert {line["level"] for line in made.log} == {"info"}
    others = [line["event"] for line in made.log if line["event"] != "request"]
    assert len(made.log) == counted + len(others)
    assert [event for event in others if not event.startswith("loaded")] == ["starting", "ready", "draining", "stopped"]


def numbers(server: Any) -> dict[str, float]:
    """What /metrics says, by name and labels as they stand there."""
    text = server.get("/metrics").text
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}


def test_b30_token_ids_outside_the_vocabulary_harm_nobody_at_two_ranks(server: Any) -> None:
    expected = server.complete(max_tokens=200, ignore_eos=True)["choices"]
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.complete, max_tokens=200, ignore_eos=True) for _ in range(2)]
        server.wait_running()
        for prompt, place in (
            ([1, 999_999_999], "prompt[1]"),
            ([-1], "prompt[0]"),
            ([VOCAB], "prompt[0]"),
            ([1.5], "prompt[0]"),
            ([True], "prompt[0]"),
            ([[1], [VOCAB]], "prompt[1][0]"),
            ([2**63], "prompt[0]"),
        ):
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt}, timeout=60)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, place)
            assert str(VOCAB - 1) in error["message"]
        assert [each.result()["choices"] for each in running] == [expected, expected]


class Visitor:
    """A connection with one request for far more tokens than anybody waits for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def come(cls, server: Any, *, stream: bool) -> Visitor:
        self = cls(*await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        body = json.dumps(WISH | {"stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        self.writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        return self

    async def leave(self, chunks: int = 0) -> None:
        """Once it has got so many chunks."""
        for _ in range(chunks):
            await self.reader.readuntil(b"data: ")
        self.writer.close()


async def accepted(server: Any, number: int) -> None:
    """Return once there are so many."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        while (await client.get("/v1/load")).json()["accepted"] != number:
            await asyncio.sleep(0.02)


async def come_and_go(server: Any) -> None:
    """200 streams, left after 0, 1 and 3 chunks, one of them by closing its own side alone, and 50 that wait."""
    streams = [await Visitor.come(server, stream=True) for _ in range(200)]
    await accepted(server, 200)
    whole = [await Visitor.come(server, stream=False) for _ in range(50)]
    await accepted(server, 250)
    for visitor in whole:
        await visitor.leave()
    half = streams.pop()
    await asyncio.gather(*(visitor.leave((0, 1, 3)[place % 3]) for place, visitor in enumerate(streams)))
    await accepted(server, 1)
    await half.reader.readuntil(b"data: ")
    half.writer.write_eof()
    await half.reader.read()
    half.writer.close()


def test_b53_two_hundred_and_fifty_clients_that_leave_two_ranks(server: Any) -> None:
    before = numbers(server)
    asyncio.run(come_and_go(server))
    gone = 'paceline_request_errors_total{code="client_gone"}'
    while (got := numbers(server))[gone] - before[gone] < 250 or got["paceline_num_requests_running"]:
        time.sleep(0.02)
    abort = 'paceline_request_success_total{finished_reason="abort"}'
    assert [got[name] - before[name] for name in (gone, abort)] == [250, 250]
    assert (got["paceline_num_requests_waiting"], got["paceline_accepted_answers"]) == (0, 0)
    blocks = {state: got[f'paceline_kv_cache_blocks{{state="{state}"}}'] for state in ("free", "cached", "used")}
    assert (blocks["used"], blocks["free"] + blocks["cached"]) == (0, NUM_BLOCKS)
    # Had one of them stayed, there were 4,000 steps.
    steps = 'paceline_rank_steps_total{rank="0"}'
    assert got[steps] - before[steps] < 2000
    assert server.complete()["usage"]["completion_tokens"] == 8
