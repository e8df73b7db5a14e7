"""Field reports, to the letter, against the whole server but its processes: HTTP, the link, and a real tiny model."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from paceline.launcher.default_model import default_model_path
from paceline.launcher.llm import LLM
from paceline.launcher.serving.app import create_app
from paceline.launcher.serving.children import Endpoint
from paceline.launcher.serving.engine_link import EngineLink
from paceline.launcher.serving.engine_loop import EngineLoop
from paceline.launcher.serving.messages import FrontReady
from paceline.launcher.serving.settings import ServerSettings
from paceline.launcher.tokenizer import TOKENIZER_FILES, Tokenizer

pytestmark = pytest.mark.anyio

VOCAB = 49152
NUM_BLOCKS = 48


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has the default model's tokenizer."""
    made = tmp_path_factory.mktemp("model")
    shutil.copytree(tiny("llama", vocab_size=VOCAB).folder, made, dirs_exist_ok=True)
    for name in (*TOKENIZER_FILES, "special_tokens_map.json", "chat_template.jinja"):
        if (default_model_path() / name).exists():
            shutil.copy(default_model_path() / name, made)
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """An engine that serves, with few blocks and short steps, in a thread."""
    over = threading.Event()
    with (
        LLM(folder, device="cpu", num_blocks=NUM_BLOCKS, block_size=8, max_batched_tokens=64) as llm,
        Endpoint() as endpoint,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
        ThreadPoolExecutor(1) as pool,
    ):
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(endpoint.address)
        loop = pool.submit(EngineLoop(llm.engine, socket).run, over.is_set)
        yield endpoint.address
        over.set()
        loop.result(timeout=60)
        llm.engine.coordinator.check_invariants()


@pytest.fixture(scope="module")
def words(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


Client = httpx.AsyncClient


@pytest.fixture
async def client(address: str, words: Tokenizer) -> AsyncIterator[Client]:
    """A client of the server; in the end nothing of its requests is left."""
    async with _served(address, words) as made:
        yield made


@asynccontextmanager
async def _served(address: str, words: Tokenizer, **settings: Any) -> AsyncIterator[Client]:
    link = EngineLink(address)
    receiving = asyncio.create_task(link.receive())
    link.send(FrontReady())
    while link.info is None:
        await asyncio.sleep(0.005)
    app = create_app(link, words, ServerSettings(model_names=("tiny",), **settings))
    async with Client(transport=httpx.ASGITransport(app), base_url="http://server", timeout=60) as made:
        yield made
        deadline = time.monotonic() + 60
        while (load := (await made.get("/v1/load")).json())["running"] + load["waiting"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        blocks = load["cache_blocks"]
        assert (load["accepted"], blocks["used"], blocks["free"] + blocks["cached"]) == (0, 0, NUM_BLOCKS)
    receiving.cancel()
    link.close()


async def complete(client: Client, **fields: Any) -> dict[str, Any]:
    """A whole answer."""
    answer = await client.post("/v1/completions", json={"ignore_eos": True, "max_tokens": 12, **fields})
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


async def stream(client: Client, **fields: Any) -> tuple[dict[int, str], dict[int, str], dict[str, Any]]:
    """Text and finish reason of each choice, and the usage, of a streamed answer."""
    body = {"ignore_eos": True, "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}, **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = {}
    for event in answer.text.strip().split("\n\n")[:-1]:
        content = json.loads(event.removeprefix("data: "))
        usage = content["usage"]
        for choice in content["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"] is not None:
                assert choice["index"] not in reasons
                reasons[choice["index"]] = choice["finish_reason"]
    return texts, reasons, usage


async def test_b14_an_unfinished_character_of_the_prompt_stays_out_of_the_answer(
    client: Client, words: Tokenizer
) -> None:
    pepper = words.encode("\U0001f336")
    for prompt in (pepper[:-1], words.encode("a\U0001fae0\U0001f979龜 b")[:-2]):
        for max_tokens in (1, 2, 30):
            wish = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 1.5, "seed": 3, "logprobs": 0}
            whole = (await complete(client, **wish))["choices"][0]
            texts, _, _ = await stream(client, **wish)
            assert texts == {0: whole["text"]}
            assert len(whole["logprobs"]["tokens"]) == max_tokens
    # The answer would complete the prompt's character, were it not a text of its own.
    wish = {"prompt": pepper[:-1], "max_tokens": 2, "temperature": 0, "logit_bias": {str(pepper[-1]): 100}}
    expected = words.backend.decode([pepper[-1]] * 2)
    assert "\ufffd" in expected
    assert (await complete(client, **wish))["choices"][0]["text"] == expected
    assert (await stream(client, **wish))[0] == {0: expected}


async def test_b30_token_ids_outside_the_vocabulary_harm_nobody(client: Client) -> None:
    long = {"prompt": [1, 2, 3], "max_tokens": 100, "temperature": 0}
    expected = await complete(client, **long)
    running = [asyncio.create_task(complete(client, **long)) for _ in range(2)]
    for prompt, place in (
        ([1, 999_999_999], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([VOCAB], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([[1], [VOCAB]], "prompt[1][0]"),
        ([2**63], "prompt[0]"),
    ):
        answer = await client.post("/v1/completions", json={"prompt": prompt})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, place)
        assert str(VOCAB - 1) in error["message"]
    for answer in await asyncio.gather(*running):
        assert answer["choices"] == expected["choices"]


async def test_b32_choices_of_one_seed(client: Client) -> None:
    """Twice, streamed and not; the third time so many at once that the blocks do not suffice for all."""
    wish = {"prompt": list(range(100, 120)), "n": 4, "seed": 3, "temperature": 1, "max_tokens": 16}
    whole = await complete(client, **wish)
    texts = {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert sorted(texts) == [0, 1, 2, 3]
    assert len(set(texts.values())) == 4
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (20, 64)
    reasons = dict.fromkeys(range(4), "length")
    for again in [await stream(client, **wish), *await asyncio.gather(*(stream(client, **wish) for _ in range(8)))]:
        assert again[:2] == (texts, reasons)
        assert (again[2]["prompt_tokens"], again[2]["completion_tokens"]) == (20, 64)


async def test_b33_tiny_and_huge_numbers_in_one_batch(client: Client) -> None:
    """Each answer is what the same request gets alone, and all that tend to argmax are argmax."""
    greedy = [{"temperature": value} for value in (0, 1e-10, 1e-4)]
    greedy += [{"temperature": 1, "top_p": value} for value in (0, 1e-8)] + [{"temperature": 100, "top_k": 1}]
    other = [{"temperature": value, "seed": 1} for value in (0.01, 2, 100)] + [{"top_p": 1, "seed": 2}]
    other += [{"temperature": 0, "logit_bias": {"5": -100}}, {"temperature": 2, "seed": 4, "logit_bias": {"9": 100}}]
    wishes = [{"prompt": [7, 8, 9], **rules} for rules in (*greedy, *other)]
    alone = [(await complete(client, **wish))["choices"] for wish in wishes]
    together = await asyncio.gather(*(complete(client, **wish) for wish in wishes))
    assert [each["choices"] for each in together] == alone
    assert all(choices == alone[0] for choices in alone[: len(greedy)])


async def test_b34_numbers_out_of_range_leave_the_engine_well(client: Client) -> None:
    cases: list[tuple[str, str]] = [
        *(("top_k", value) for value in ("-5", "0.01", "2147483648")),
        *(("logprobs", value) for value in ("-1", "21", "1000000000")),
        *(("logit_bias", value) for value in ('{"999999":1}', '{"-1":1}', '{"a":1}', '{"5":1e400}')),
        *(("n", value) for value in ("0", "-1", "5000000")),
        *(("temperature", value) for value in ("-1", "NaN", "Infinity", '"hot"')),
        *(("top_p", "1.01"), ("min_p", "2"), ("repetition_penalty", "0"), ("seed", str(2**70))),
        ("stop", json.dumps(["x"] * 10_000)),
    ]
    tracemalloc.start()
    for field, value in cases:
        content = f'{{"prompt": [1], "{field}": {value}}}'
        answer = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), content
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20, "nothing is made of what is refused"
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    for number in (21, 10**9):
        answer = await client.post("/v1/chat/completions", json=chat | {"top_logprobs": number})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")
    plain = await complete(client, prompt=[1], temperature=1, seed=5)
    for off in (0, -1, VOCAB + 1):
        assert (await complete(client, prompt=[1], temperature=1, seed=5, top_k=off))["choices"] == plain["choices"]


async def test_b58_ten_thousand_that_wait(address: str, words: Tokenizer, pass_seconds: Any) -> None:
    """One more is told to come back; those past their time are told so, and leave nothing (the end of _served)."""
    async with _served(address, words, max_queue=10_000, request_timeout=600) as client:
        body = {"prompt": [[1, 2]] * 1000, "max_tokens": 200, "ignore_eos": True}
        crowd = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(10)]
        while "paceline_accepted_answers 10000.0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        one = await client.post("/v1/completions", json={"prompt": [1]})
        assert (one.status_code, one.json()["error"]["code"]) == (429, "queue_full")
        assert int(one.headers["retry-after"]) >= 1
        pass_seconds(600)
        ends = [(answer.status_code, answer.json()["error"]["code"]) for answer in await asyncio.gather(*crowd)]
        assert ends == [(504, "request_timeout")] * 10
        assert (await complete(client, prompt=[1], max_tokens=3))["usage"]["completion_tokens"] == 3


async def test_b39_penalties_over_http_are_those_of_the_definition(client: Client, folder: Path) -> None:
    """Step by step against transformers' model, alone, in a mixed batch, and with the prompt in the cache."""
    import torch
    from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    processor = RepetitionPenaltyLogitsProcessor(penalty=1.5)
    prompt = [7, 7, 7, 8] * 5

    def expected(repetition: bool, presence: float, frequency: float) -> list[float]:
        ids, chosen = list(prompt), []
        for _ in range(12):
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[:, -1]
            scores = processor(torch.tensor([ids]), logits.clone()) if repetition else logits.clone()
            counts = torch.bincount(torch.tensor(ids[len(prompt) :], dtype=torch.long), minlength=VOCAB)
            scores -= presence * (counts > 0) + frequency * counts
            token = int(scores.argmax())
            ids.append(token)
            chosen.append(float(logits.log_softmax(-1)[0, token]))
        return chosen

    rules = [(False, 0.0, 0.0), (True, 0.0, 0.0), (False, 1.0, 0.0), (False, 0.0, 1.0), (True, 1.0, 1.0)]
    wishes = [
        {
            "prompt": prompt,
            "temperature": 0,
            "logprobs": 0,
            "presence_penalty": presence,
            "frequency_penalty": frequency,
        }
        | ({"repetition_penalty": 1.5} if repetition else {})
        for repetition, presence, frequency in rules
    ]
    answers = [await complete(client, **wish) for wish in wishes]
    answers += await asyncio.gather(*(complete(client, **wish) for wish in wishes))
    assert answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for place, answer in enumerate(answers):
        told = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert told == pytest.approx(expected(*rules[place % len(rules)]), abs=1e-3)
