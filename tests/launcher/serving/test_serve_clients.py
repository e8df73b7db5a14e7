"""Real clients against a real server of the default model: the openai package, curl, and many that leave."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from playwright.sync_api import Page, expect

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def url(default_model: Path) -> Iterator[str]:
    """A server's address; in the end it is told to stop, and does."""
    command = [sys.executable, "-m", "paceline.launcher.start", "serve", str(default_model), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--served-model-name", MODEL, "--device", "cpu", "--max-model-len", "512", "--num-blocks", "256"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"paceline: serving {MODEL} at http://127.0.0.1:")
    yield line.split()[-1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


get = partial(httpx.get, timeout=60)


def test_a_chat_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32
    )
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


class Answer(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    confidence: float = pydantic.Field(ge=0, le=1)
    is_capital: bool


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": QUESTION}]
    for temperature in (0, 2):
        answer = client.chat.completions.parse(
            model=MODEL, messages=question, response_format=Answer, temperature=temperature, seed=1, max_tokens=200
        )
        assert isinstance(answer.choices[0].message.parsed, Answer)
        assert answer.choices[0].finish_reason == "stop"


def test_a_choice_as_plain_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="Yes or no?",
        temperature=1,
        seed=3,
        extra_body={"structured_outputs": {"choice": ["Yes", "No"]}},
    )
    assert answer.choices[0].text in ("Yes", "No")


def test_a_name_that_only_a_stranger_gives_the_server_is_refused(url: str) -> None:
    assert get(f"{url}/v1/models").status_code == 200
    assert get(f"{url}/v1/models", headers={"host": "evil.example"}).status_code == 403


def test_a_streamed_answer_is_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 5


def test_a_stop_text_ends_the_request_in_the_engine(client: openai.OpenAI, url: str) -> None:
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=200, stop=[" 7"])
    assert answer.choices[0].text == " 5, 6,"
    assert answer.choices[0].finish_reason == "stop"
    assert get(f"{url}/v1/load").json()["running"] == 0


def test_a_bad_request_is_the_clients_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="hi", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="another-model"):
        client.completions.create(model="another-model", prompt="hi")


def test_curl(url: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    command = [
        "curl",
        "-sS",
        f"{url}/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps(body),
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(output)["choices"][0]["message"]["content"] == ANSWER


def test_clients_that_leave_at_random_leave_nothing_behind(url: str) -> None:
    rng = random.Random(11)

    async def visit(everyone: openai.AsyncOpenAI) -> None:
        prompt = " ".join(rng.choices(("red", "green", "blue", "seven"), k=rng.randint(1, 60)))
        stream = await everyone.completions.create(
            model=MODEL, prompt=prompt, max_tokens=rng.randint(1, 40), n=rng.randint(1, 2), stream=True
        )
        patience = rng.randint(0, 30)
        async with stream:
            async for _ in stream:
                patience -= 1
                if patience <= 0:
                    break

    async def crowd() -> None:
        # Closed in its own loop: what is left to the garbage collector closes in another test's.
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as everyone:
            await asyncio.gather(*(visit(everyone) for _ in range(64)))

    asyncio.run(crowd())
    deadline = time.monotonic() + 60
    while (load := get(f"{url}/v1/load").json())["running"] + load["waiting"] and time.monotonic() < deadline:
        time.sleep(0.05)
    blocks = load["cache_blocks"]
    assert (load["accepted"], load["running"], load["waiting"], blocks["used"]) == (0, 0, 0, 0)
    assert blocks["free"] + blocks["cached"] == 256


# The last one here, since the browser's own event loop runs until the module ends.
@pytest.mark.browser
def test_the_page_talks_to_the_model_and_shows_its_engine(url: str, open_page: Callable[..., Page]) -> None:
    page = open_page(url)
    expect(page.locator("#model")).to_have_text(MODEL)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Show token probabilities").check()
    page.get_by_role("button", name=QUESTION).click()
    answer = page.get_by_role("article", name="Answer")
    expect(answer.get_by_role("button", name="Regenerate")).to_be_visible()
    assert "".join(answer.locator(".token").all_text_contents()) == f"{ANSWER}<|im_end|>"
    page.get_by_role("tab", name="Engine").click()
    expect(page.locator("#blocks")).to_have_attribute("aria-label", re.compile("^0 blocks used, [1-9]"))
    expect(page.locator("#ranks")).to_contain_text("cpu · threads: 1")
    expect(page.locator("#steps-readout")).to_contain_text(re.compile(r"Step \d+: 1 row, 0 prompt tokens, 1 decoded"))
