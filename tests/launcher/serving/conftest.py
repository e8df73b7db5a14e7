"""A server over an engine that answers at once and says always the same: it repeats its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from paceline.coordinator.block_manager import BlockUsage
from paceline.coordinator.errors import EngineError
from paceline.coordinator.events import CoordinatorStats, RequestTimings
from paceline.coordinator.messages import TokenLogprobs
from paceline.coordinator.sampling_params import SamplingParams
from paceline.launcher.default_model import default_model_path
from paceline.launcher.serving.app import create_app
from paceline.launcher.serving.engine_api import EngineInfo, TokenNews
from paceline.launcher.serving.settings import ServerSettings
from paceline.launcher.tokenizer import Tokenizer

KEY = "sk-right"


class EchoEngine:
    """Repeats a request's prompt token by token, begun at the place that its seed says, and then ends it.

    `script` are token ids to say in place of the prompt. While `gate` is not set every request waits.
    """

    def __init__(self, end_id: int, vocab_size: int) -> None:
        self.info: EngineInfo | None = EngineInfo(
            vocab_size=vocab_size,
            max_model_len=512,
            num_blocks=1024,
            block_size=16,
            end_ids=(end_id,),
            tensor_parallel_size=1,
        )
        self.failure: str | None = None
        self.grammar_error: str | None = None
        """How every request by a grammar ends, after its first token."""
        self.script: Sequence[int] | None = None
        self.tokens_at_once = 1
        self.gate = asyncio.Event()
        self.gate.set()
        self.token_seconds = 0.0
        self.running: dict[str, SamplingParams] = {}
        self.submitted: list[tuple[str, Sequence[int], SamplingParams, int, str]] = []
        self.aborted: list[str] = []
        self.generated = 0
        self.prompt_tokens = 0

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[TokenNews]:
        assert params.n == 1
        assert request_id not in self.running
        self.submitted.append((request_id, prompt_token_ids, params, priority, cache_salt))
        self.running[request_id] = params
        self.prompt_tokens += len(prompt_token_ids)
        return self._answer(request_id, prompt_token_ids, params)

    async def _answer(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[TokenNews, None]:
        assert self.info is not None
        script = list(self.script if self.script is not None else prompt)
        start = (params.seed or 0) % len(script)
        said = [*script[start:], *script[:start], self.info.end_ids[0]]
        while params.ignore_eos and len(said) < 4096:
            said = said[:-1] + said
        limit = min(10**9 if params.max_tokens is None else params.max_tokens, self.info.max_model_len - len(prompt))
        said = said[:limit]
        cached = len(prompt) // 2
        place = 0
        try:
            while True:
                await self.gate.wait()
                await asyncio.sleep(self.token_seconds)
                if self.failure is not None:
                    raise EngineError(self.failure)
                if request_id not in self.running:
                    yield TokenNews((), (), len(prompt), cached, "abort", None, RequestTimings(0.0, 0.01, 0.02, 1.0))
                    return
                ids = said[place : place + self.tokens_at_once]
                place += len(ids)
                self.generated += len(ids)
                enders = {*params.stop_token_ids, *(() if params.ignore_eos else self.info.end_ids)}
                stop = next((token for token in ids if token in enders), None)
                if stop is not None:
                    ids = ids[: ids.index(stop) + 1]
                reason = "stop" if stop is not None else "length" if place >= len(said) else None
                logprobs = () if params.logprobs is None else [self._logprobs(token, params.logprobs) for token in ids]
                timings = None
                if reason is not None:
                    timings = RequestTimings(0.0, 0.01, 0.02, 1.0)
                    del self.running[request_id]
                scores = prompt[1:] if params.prompt_logprobs is not None and place <= self.tokens_at_once else ()
                scored = [self._logprobs(token, params.prompt_logprobs or 0) for token in scores]
                yield TokenNews(ids, logprobs, len(prompt), cached, reason, stop, timings, scored)
                if reason is not None:
                    return
                if params.grammar is not None and self.grammar_error is not None:
                    del self.running[request_id]
                    yield TokenNews((), (), len(prompt), cached, "error", error=self.grammar_error)
                    return
        finally:
            self.abort(request_id)

    @staticmethod
    def _logprobs(token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(
            -0.5,
            [token + place for place in range(count)],
            [-0.5 - place if place < 3 else -float("inf") for place in range(count)],
            rank=7,
        )

    def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    async def stats(self) -> CoordinatorStats:
        if self.failure is not None:
            raise EngineError(self.failure)
        return CoordinatorStats(
            waiting=0,
            running=len(self.running),
            blocks=BlockUsage(free=1000, cached=20, used=4),
            steps=7,
            preemptions=3,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.prompt_tokens // 2,
            generated_tokens=self.generated,
            finished={},
        )


class Served:
    """An application and its engine."""

    def __init__(self, engine: EchoEngine, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.app: FastAPI = create_app(engine, tokenizer, settings)

    def http(self, **options: Any) -> httpx.AsyncClient:
        """A client of this application."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://server", **options)

    def openai(self) -> AsyncOpenAI:
        """OpenAI's own client on this application; it does not try again by itself."""
        return AsyncOpenAI(base_url="http://server/v1", api_key=KEY, http_client=self.http(), max_retries=0)

    def ids(self, text: str) -> list[int]:
        """The text's token ids."""
        return self.tokenizer.encode(text)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """SmolLM2's."""
    return Tokenizer(default_model_path())


Serve = Callable[..., Served]


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Serve:
    """serve(**settings): a server of its own."""

    def make(*, with_tokenizer: Tokenizer = tokenizer, **settings: Any) -> Served:
        engine = EchoEngine(tokenizer.end_ids[0], len(tokenizer.backend))
        return Served(engine, with_tokenizer, ServerSettings(**{"model_names": ("smol", "alias")} | settings))

    return make


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve()


@pytest.fixture
def on_a_socket() -> Callable[[FastAPI], Any]:
    """on_a_socket(app): `async with` it, the application on uvicorn at the address it gives."""
    import uvicorn

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncGenerator[str, None]:
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
        task = asyncio.create_task(server.serve())
        try:
            while not server.started:
                assert not task.done()
                await asyncio.sleep(0.005)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            await task

    return run
