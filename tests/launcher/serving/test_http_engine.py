"""GET /v1/engine: what people who watch are shown, and how little that costs."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from paceline.coordinator.block_manager import CACHED, FREE, SHARED
from paceline.launcher.serving.watching import MOST_CELLS, block_map

pytestmark = pytest.mark.anyio


async def test_one_moment_of_the_engine(served: Any) -> None:
    served.engine.gate.clear()
    async with served.http() as client:
        running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a secret question"}))
        while not served.engine.running:
            await asyncio.sleep(0.001)
        answer = await client.get("/v1/engine")
        served.engine.gate.set()
        await running
    assert answer.status_code == 200
    assert "secret" not in answer.text
    state = answer.json()
    assert state["model"] == "smol"
    assert [(rank["rank"], rank["device"]) for rank in state["ranks"]] == [
        (0, "cpu · 2 threads"),
        (1, "cpu · 2 threads"),
    ]
    assert [(rank["memory_used"], rank["silence"]) for rank in state["ranks"]] == [(4000, 0.0), (4001, 0.25)]
    assert "step_seconds" not in state["stats"]
    assert state["stats"]["blocks"] == {"free": 1000, "cached": 20, "used": 4}
    assert state["stats"]["running"] == 1
    (request,) = state["requests"]
    assert request["id"] == served.engine.submitted[0][0]
    assert (request["slot"], request["prompt_tokens"], request["generated_tokens"]) == (0, 9, 3)
    runs = [[1000, 0, 0, 0, None], [20, 0, 0, 1, None], [4, 1, 0, 0, 0]]
    assert state["blocks"] == {"number": 1024, "block_size": 16, "blocks_per_cell": 1, "runs": runs}
    assert state["steps"][5] == {"step": 5, "planned": 0.5, "rows": 3, "prompt_tokens": 20, "decode_tokens": 2}


async def test_many_who_watch_ask_the_engine_once(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launcher.serving.watching.SHARE_SECONDS", 60.0)
    async with served.http() as client:
        answers = await asyncio.gather(*(client.get("/v1/engine") for _ in range(20)))
        assert [answer.json()["taken"] for answer in answers] == [1.0] * 20
        monkeypatch.setattr("paceline.launcher.serving.watching.SHARE_SECONDS", 0.0)
        assert (await client.get("/v1/engine")).json()["taken"] == 2.0


async def test_an_engine_that_is_not_there_is_an_error(served: Any) -> None:
    async with served.http() as client:
        served.engine.failure = "rank 1 is gone"
        answer = await client.get("/v1/engine")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
        served.engine.failure, served.engine.info = None, None
        answer = await client.get("/v1/engine")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


@pytest.mark.parametrize("number", [1, 4095, 4096, 4097, 100_000])
def test_a_map_accounts_for_every_block(number: int) -> None:
    kinds = (FREE, FREE, CACHED, SHARED, 5, 5, 9)
    holders = array("i", [kinds[(place // 50) % 7] for place in range(number)])
    shown = block_map(holders, 16)
    cells = sum(run[0] for run in shown["runs"])
    per = shown["blocks_per_cell"]
    assert cells == -(-number // per) <= MOST_CELLS
    totals = [sum(run[0] * run[column] for run in shown["runs"]) for column in (1, 2, 3)]
    used = sum(holder not in (FREE, CACHED) for holder in holders)
    assert totals == [used, holders.count(SHARED), holders.count(CACHED)]


def test_a_cell_names_the_one_request_that_holds_all_it_has_used() -> None:
    cells = [[FREE, 5, CACHED], [5, 9, FREE], [5, SHARED, FREE], [SHARED, SHARED, FREE], [CACHED, CACHED, FREE]]
    holders = array("i", [holder for cell in cells for holder in cell] + [FREE] * (3 * MOST_CELLS - 15))
    assert block_map(holders, 16)["runs"] == [
        [1, 1, 0, 1, 5],
        [1, 2, 0, 0, None],
        [1, 2, 1, 0, None],
        [1, 2, 2, 0, None],
        [1, 0, 0, 2, None],
        [MOST_CELLS - 5, 0, 0, 0, None],
    ]
