"""The default model, and one made by two processes at once; a scripted server for the clients; a browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.launcher.default_model import default_model_path

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@dataclass(frozen=True)
class MadeModel:
    """What two processes that made the default model together had to say."""

    cache: Path
    folders: list[str]
    messages: list[str]

    @property
    def folder(self) -> Path:
        return Path(self.folders[0])


@pytest.fixture(scope="session")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeModel]:
    """The default model, fetched and converted for real into a cache of its own."""
    cache = tmp_path_factory.mktemp("paceline-cache")
    code = "from paceline.launcher.default_model import default_model_path as make; print(make())"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PACELINE_CACHE": str(cache), "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    yield MadeModel(cache, [out.strip() for out, _ in outputs], [err for _, err in outputs])
    shutil.rmtree(cache)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Folder of the default model's checkpoint, in the user's cache, where the whole test run makes it once."""
    return default_model_path()


class StubServer:
    """An OpenAI-compatible server in this process that says what it is told to, over real connections.

    Its tokenizer knows words: each is one token, whose id is its place in `words`. What `script` makes of a request's
    body is sent: a list is a stream's events, a dict the whole answer, a tuple a status and a body.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        """Of the requests for answers, in the order they came."""
        self.headers: list[dict[str, str]] = []
        self.words: dict[str, int] = {}
        self.refused: set[str] = set()
        """Fields that are a 400."""
        self.key: str | None = None
        self.model: dict[str, Any] = {"id": "stub", "max_model_len": 4096}
        self.script: Callable[[dict[str, Any]], Any] = lambda body: stub_answer(body)
        self.pause = 0.0
        """Seconds before each event."""
        self.may_answer: Callable[[], bool] = lambda: True
        """An answer waits until this is so."""
        self.running = 0
        self.most_running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application."""
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        data, more = b"", True
        while more:
            message = await receive()
            data, more = data + message.get("body", b""), message.get("more_body", False)
        body = json.loads(data) if data else {}
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            await self._whole(send, 401, {"error": {"message": "no such key", "code": "invalid_api_key"}})
        elif scope["path"] == "/v1/models":
            await self._whole(send, 200, {"object": "list", "data": [self.model]})
        elif scope["path"] == "/tokenize":
            text = body["prompt"] if "prompt" in body else "<user> " + body["messages"][0]["content"] + " <answer>"
            await self._whole(send, 200, {"tokens": [self.words.setdefault(w, len(self.words)) for w in text.split()]})
        elif scope["path"] in ("/v1/completions", "/v1/chat/completions"):
            self.headers.append(headers)
            self.bodies.append(body)
            self.running += 1
            self.most_running = max(self.running, self.most_running)
            try:
                await self._answer(receive, send, body)
            finally:
                self.running -= 1
        else:
            await self._whole(send, 404, {"error": {"message": "no such path", "code": "unknown_url"}})

    async def _answer(self, receive: Any, send: Any, body: dict[str, Any]) -> None:
        fields = body.keys() | (body.get("stream_options") or {}).keys()
        for field in sorted(self.refused & fields):
            await self._whole(send, 400, {"error": {"message": f"unknown field {field!r}", "param": field}})
            return
        answer = self.script(body)
        while not self.may_answer():
            await asyncio.sleep(0.005)
        if isinstance(answer, tuple):
            await self._whole(send, *answer)
        elif isinstance(answer, dict):
            await asyncio.sleep(self.pause)
            await self._whole(send, 200, answer)
        else:
            head = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            leaving = asyncio.ensure_future(receive())
            for event in answer:
                await asyncio.sleep(self.pause)
                if leaving.done():
                    return
                data = f"data: {json.dumps(event) if isinstance(event, dict) else event}\n\n".encode()
                await send({"type": "http.response.body", "body": data, "more_body": True})
            leaving.cancel()
            await send({"type": "http.response.body", "body": b""})

    async def _whole(self, send: Any, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        head.append((b"x-request-id", b"req-7"))
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": data})


def stub_answer(body: dict[str, Any]) -> Any:
    """As many tokens as asked for, two in the first event and one in each later one, with usage as asked."""
    chat = "messages" in body
    prompt = len(body["messages"][-1]["content"].split()) + 2 if chat else len(body["prompt"])
    total = body.get("max_tokens") or 3
    usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + total, "completion_tokens": total}
    usage["prompt_tokens_details"] = {"cached_tokens": prompt // 2}
    if not body.get("stream"):
        text = f"{total} tokens"
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {"object": "answer", "choices": [choice | {"index": 0, "finish_reason": "length"}], "usage": usage}
    options = body.get("stream_options") or {}
    events: list[Any] = []
    said = 0
    while said < total:
        said = min(total, said + (2 if said == 0 else 1))
        text = f" w{said}"
        event: dict[str, Any] = {"choices": [{"delta": {"content": text}} if chat else {"text": text}]}
        if options.get("continuous_usage_stats"):
            event["usage"] = usage | {"completion_tokens": said}
        events.append(event)
    if options.get("include_usage"):
        events.append({"choices": [], "usage": usage})
    return [*events, "[DONE]"]


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A server of its own, at stub.url."""
    import uvicorn

    app = StubServer()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    app.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield app
    server.should_exit = True
    thread.join()


CHROMIUM_SWITCHES = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
CHROMIUM_SWITCHES += ("--disable-background-networking", "--disable-component-update", "--disable-sync")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Headless Chromium, the system's own. While it is there no other event loop can run in its thread."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name)) is not None), None)
    if path is None:
        pytest.skip(f"needs a browser, none of {', '.join(names)} is installed")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_SWITCHES))
        yield browser
        browser.close()


OpenPage = Callable[..., "Page"]


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[OpenPage]:
    """open_page(url, **context options): the page there, in a profile of its own.

    In the end no page may have logged an error, shown a dialog, or asked another host for anything.
    """
    complaints: list[str] = []
    with contextlib.ExitStack() as stack:

        def open_one(url: str, *, expect_errors: bool = False, **options: Any) -> Page:
            context = chromium.new_context(**options)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(60_000)
            if not expect_errors:
                # The browser itself logs each answer of status 400 and more.
                page.on("console", lambda said: complaints.append(said.text) if said.type != "log" else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
            page.on("request", lambda asked: complaints.append(asked.url) if not asked.url.startswith(url) else None)
            page.goto(url)
            return page

        yield open_one
    assert complaints == []
