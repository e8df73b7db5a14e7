"""The engine's loop and the link to it, over a real socket: a tiny model in a thread, its clients in an event loop."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import zmq

from paceline.coordinator.block_manager import SHARED
from paceline.coordinator.errors import EngineError, InputError
from paceline.coordinator.events import RequestEvent
from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.llm import LLM
from paceline.launcher.serving.children import Endpoint
from paceline.launcher.serving.engine_api import EngineApi, EngineInfo
from paceline.launcher.serving.engine_link import EngineLink
from paceline.launcher.serving.engine_loop import EngineLoop
from paceline.launcher.serving.messages import EngineReady, FrontReady, News, Submit, decode, encode

NUM_BLOCKS = 64
BLOCK_SIZE = 8
LONG = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0)


@pytest.fixture(scope="module")
def llm(tiny: Callable[..., Any]) -> Iterator[LLM]:
    with LLM(tiny("llama").folder, device="cpu", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE) as made:
        yield made


@contextmanager
def looping(llm: LLM) -> Iterator[tuple[str, Callable[[], BaseException | None]]]:
    """The engine's loop in a thread: its address, and what it ended with once it has."""
    over = threading.Event()
    with (
        Endpoint() as endpoint,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
        ThreadPoolExecutor(1) as pool,
    ):
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(endpoint.address)
        loop = pool.submit(EngineLoop(llm.engine, socket).run, over.is_set)
        try:
            yield endpoint.address, lambda: loop.exception(timeout=60)
        finally:
            over.set()
            loop.exception(timeout=60)
            while llm.engine.coordinator.has_work:
                llm.engine.coordinator.step()


@asynccontextmanager
async def linked(address: str) -> AsyncIterator[EngineLink]:
    """A link whose engine is ready."""
    link = EngineLink(address)
    receiving = asyncio.create_task(link.receive())
    link.send(FrontReady())
    while link.info is None:
        await asyncio.sleep(0.01)
    try:
        yield link
    finally:
        receiving.cancel()
        link.close()


def drive(llm: LLM, scenario: Callable[[EngineLink], Coroutine[Any, Any, Any]]) -> Any:
    """What a scenario returns that has the link to itself."""

    async def run(address: str) -> Any:
        async with linked(address) as link:
            return await asyncio.wait_for(scenario(link), 60)

    with looping(llm) as (address, _):
        return asyncio.run(run(address))


async def read(news: AsyncIterator[RequestEvent]) -> list[RequestEvent]:
    return [each async for each in news]


def test_answers_are_those_of_the_engine_itself(llm: LLM) -> None:
    prompts = [list(range(index, 2 * index + 3)) for index in range(12)]
    rules: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"seed": 5, "top_k": 20, "logit_bias": {7: 4.0}},
        {"temperature": 0, "stop_token_ids": list(range(0, 256, 3)), "min_tokens": 2},
    ]
    params = [SamplingParams(max_tokens=20, **rules[index % 3]) for index in range(12)]
    expected = llm.generate(prompts, params)

    async def scenario(link: EngineLink) -> list[list[RequestEvent]]:
        requests = (link.submit(f"r{i}", prompts[i], params[i]) for i in range(12))
        return await asyncio.gather(*(read(request) for request in requests))

    for prompt, output, news in zip(prompts, expected, drive(llm, scenario), strict=True):
        choice = output.outputs[0]
        assert [token for each in news for token in each.token_ids] == choice.token_ids
        if choice.logprobs is not None:
            got = [(entry.chosen, list(entry.top_ids)) for each in news for entry in each.logprobs]
            assert [token for _, token in got] == [list(entry.top_ids) for entry in choice.logprobs]
            assert [value for value, _ in got] == pytest.approx([entry.chosen for entry in choice.logprobs], abs=1e-4)
        assert [each.finish_reason for each in news] == [None] * (len(news) - 1) + [choice.finish_reason]
        last = news[-1]
        assert last.num_prompt_tokens == len(prompt)
        assert last.stop_token == (choice.token_ids[-1] if choice.finish_reason == "stop" else None)
        assert last.timings is not None
        assert last.timings.arrived <= (last.timings.first_token or 0) <= last.timings.finished


def test_the_link_is_what_the_http_side_asks_for(llm: LLM) -> None:
    async def scenario(link: EngineLink) -> None:
        api: EngineApi = link  # and the type checker agrees
        assert api.failure is None
        assert api.info is not None
        assert api.info.num_blocks == NUM_BLOCKS
        assert api.info.vocab_size == 256
        assert api.info.max_model_len == min(512, NUM_BLOCKS * BLOCK_SIZE)
        assert api.info.end_ids == llm.engine.end_ids
        before = await api.stats()
        await read(api.submit("a", list(range(40)), SamplingParams(max_tokens=4, ignore_eos=True)))
        one = SamplingParams(max_tokens=1, ignore_eos=True)
        (last,) = (await read(api.submit("b", list(range(40)), one)))[-1:]
        assert last.cached_tokens == 32
        (last,) = (await read(api.submit("c", list(range(40)), one, cache_salt="me")))[-1:]
        assert last.cached_tokens == 0
        after = await api.stats()
        assert after.generated_tokens - before.generated_tokens == 6
        assert after.finished["length"] - before.finished.get("length", 0) == 3

    drive(llm, scenario)


def test_a_bad_request_is_refused_alone(llm: LLM) -> None:
    async def scenario(link: EngineLink) -> None:
        good = asyncio.create_task(read(link.submit("good", [1, 2, 3], LONG)))
        for prompt, words in (([], "empty"), ([1, 999], "position 1"), (list(range(200)) * 3, "600 tokens")):
            with pytest.raises(InputError, match=words):
                await read(link.submit("bad", prompt, SamplingParams()))
        with pytest.raises(InputError, match="whole numbers"):
            await read(link.submit("bad", [2**40], SamplingParams()))
        with pytest.raises(InputError, match="logit_bias names token 256"):
            await read(link.submit("bad", [1], SamplingParams(logit_bias={256: 1})))
        with pytest.raises(InputError, match="too large"):
            await read(link.submit("bad", [1], SamplingParams(), priority=2**70))
        with pytest.raises(InputError, match="no valid Unicode"):
            await read(link.submit("bad", [1], SamplingParams(), cache_salt="\ud800"))
        with pytest.raises(InputError, match="in use"):
            await read(link.submit("good", [1], SamplingParams()))
        assert sum(len(each.token_ids) for each in await good) == 300

    drive(llm, scenario)


def test_who_leaves_frees_the_blocks_at_once(llm: LLM) -> None:
    async def scenario(link: EngineLink) -> None:
        news = link.submit("leaver", list(range(100)), LONG)
        await anext(news)
        assert (await link.stats()).running == 1
        await news.aclose()  # type: ignore[attr-defined]
        stats = await link.stats()  # asked right behind it
        assert stats.running == 0
        assert stats.blocks.used == 0

    drive(llm, scenario)


def test_who_watches_sees_requests_by_their_own_ids(llm: LLM) -> None:
    async def scenario(link: EngineLink) -> None:
        running = [link.submit(name, list(range(20 * place + 20)), LONG) for place, name in enumerate(("one", "two"))]
        for news in running:
            await anext(news)
        view, stats = await asyncio.gather(link.view(), link.stats())
        assert [(line.id, line.prompt_tokens) for line in view.requests] == [("one", 20), ("two", 40)]
        assert view.stats.running == stats.running == 2
        assert len(view.block_holders) == NUM_BLOCKS
        for line in view.requests:
            assert 0 < view.block_holders.count(line.slot) <= line.blocks
        assert sum(holder >= 0 or holder == SHARED for holder in view.block_holders) == view.stats.blocks.used
        assert view.steps[-1].step >= 1
        for news in running:
            await news.aclose()  # type: ignore[attr-defined]

    drive(llm, scenario)


def test_who_reads_slowly_gets_more_at_once(llm: LLM) -> None:
    async def scenario(link: EngineLink) -> None:
        params = SamplingParams(max_tokens=50, ignore_eos=True, temperature=0, logprobs=1)
        news = link.submit("slow", [1, 2, 3], params)
        got = [await anext(news)]
        while (await link.stats()).running:
            await asyncio.sleep(0.01)
        got += await read(news)
        assert len(got) == 2
        assert sum(len(each.token_ids) for each in got) == sum(len(each.logprobs) for each in got) == 50
        assert got[-1].finish_reason == "length"
        at_once = await read(link.submit("eager", [1, 2, 3], params))
        assert [t for each in at_once for t in each.token_ids] == [t for each in got for t in each.token_ids]

    drive(llm, scenario)


def test_a_first_token_waits_for_no_whole_step() -> None:
    """A hundred streams and a newcomer have news in the same message: the newcomer, last in it, reads first."""
    info = EngineInfo(256, 512, 64, 8, (2,), 1, ("stub",))

    async def scenario(engine: zmq.Socket[bytes], address: str) -> list[str]:
        read: list[str] = []

        async def client(link: EngineLink, name: str) -> None:
            async for event in link.submit(name, [1, 2, 3], LONG):
                read.extend([name] * len(event.token_ids))

        async def submitted() -> str:
            while not engine.poll(0):
                await asyncio.sleep(0.001)
            message = decode(engine.recv())
            assert isinstance(message, Submit)
            return message.request_id

        async def all_read(count: int) -> None:
            while len(read) < count:
                await asyncio.sleep(0.001)

        link = EngineLink(address)
        receiving = asyncio.create_task(link.receive())
        engine.send(encode(EngineReady(info)))
        while link.info is None:
            await asyncio.sleep(0.001)
        clients = [asyncio.create_task(client(link, f"old{number}")) for number in range(100)]
        keys = [await submitted() for _ in clients]
        engine.send(encode(News([RequestEvent(key, [7], (), 3, 0) for key in keys])))
        await all_read(100)
        clients.append(asyncio.create_task(client(link, "new")))
        keys.append(await submitted())
        engine.send(encode(News([RequestEvent(key, [7], (), 3, 0) for key in keys])))
        await all_read(201)
        for task in (*clients, receiving):
            task.cancel()
        await asyncio.gather(*clients, receiving, return_exceptions=True)
        link.close()
        return read[100:]

    with Endpoint() as endpoint, zmq.Context() as context, context.socket(zmq.DEALER) as engine:
        engine.linger = 0
        engine.bind(endpoint.address)
        order = asyncio.run(asyncio.wait_for(scenario(engine, endpoint.address), 60))
    assert order[0] == "new"
    assert order[1:] == [f"old{number}" for number in range(100)]


def test_abort_ends_the_iterator(llm: LLM) -> None:
    async def scenario(link: EngineLink) -> list[RequestEvent]:
        news = link.submit("aborted", [1, 2, 3], LONG)
        first = await anext(news)
        link.abort("aborted")
        link.abort("unknown")
        return [first, *await read(news)]

    last = drive(llm, scenario)[-1]
    assert last.finish_reason == "abort"


def test_random_aborts_leave_no_block_behind(llm: LLM) -> None:
    """32 requests at once in a cache too small for them, so that some are preempted; most leave in between."""
    rng = random.Random(3)

    async def client(link: EngineLink, number: int) -> None:
        for turn in range(3):
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
            params = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True)
            left = rng.randint(0, 40)
            news = link.submit(f"{number}", prompt, params)
            async for _ in news:
                left -= 1
                if left == 0 and turn % 2 == 0:
                    await news.aclose()  # type: ignore[attr-defined]
                    break
                if left == 0:
                    link.abort(f"{number}")

    async def scenario(link: EngineLink) -> None:
        clients = [asyncio.create_task(client(link, number)) for number in range(32)]
        await asyncio.sleep(0.2)
        for cancelled in clients[::8]:
            cancelled.cancel()
        ends = await asyncio.gather(*clients, return_exceptions=True)
        assert [end for end in ends if end is not None and not isinstance(end, asyncio.CancelledError)] == []
        stats = await link.stats()
        assert (stats.running, stats.waiting, stats.blocks.used) == (0, 0, 0)
        assert stats.blocks.free + stats.blocks.cached == NUM_BLOCKS

    drive(llm, scenario)
    llm.engine.coordinator.check_invariants()


def test_a_failing_engine_reaches_every_iterator(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.engine.coordinator.step
    broken = threading.Event()

    def failing() -> Any:
        if broken.is_set():
            raise EngineError("rank 1 fell off")
        return step()

    async def run(address: str) -> None:
        async with linked(address) as link:
            requests = [link.submit(f"{number}", [number], LONG) for number in range(8)]
            for request in requests:
                await anext(request)
            broken.set()
            for request in requests:
                with pytest.raises(EngineError, match="rank 1 fell off"):
                    await asyncio.wait_for(read(request), 60)
            assert link.failure == "rank 1 fell off"
            assert link.farewell.done()
            with pytest.raises(EngineError, match="rank 1 fell off"):
                await read(link.submit("late", [1], LONG))
            with pytest.raises(EngineError, match="rank 1 fell off"):
                await link.stats()

    monkeypatch.setattr(llm.engine.coordinator, "step", failing)
    with looping(llm) as (address, ended_with):
        asyncio.run(run(address))
        monkeypatch.undo()
        assert isinstance(ended_with(), EngineError)


def test_before_the_engine_is_ready_requests_are_turned_away() -> None:
    async def run(address: str) -> None:
        link = EngineLink(address)
        assert link.info is None
        with pytest.raises(EngineError, match="being loaded"):
            await read(link.submit("early", [1], LONG))
        link.close()

    with Endpoint() as endpoint:
        asyncio.run(run(endpoint.address))
