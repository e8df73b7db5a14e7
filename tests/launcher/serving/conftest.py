"""A server over an engine that answers at once and says always the same: it repeats its prompt."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import llguidance.hf
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI
from tokenizers import AddedToken

from paceline.coordinator.block_manager import CACHED, FREE, BlockUsage
from paceline.coordinator.errors import EngineError
from paceline.coordinator.events import CoordinatorStats, RankState, RequestEvent, RequestTimings
from paceline.coordinator.messages import TokenLogprobs
from paceline.coordinator.sampling_params import SamplingParams
from paceline.coordinator.step_times import StepTimes
from paceline.coordinator.view import EngineView, RequestLine, StepLine
from paceline.launcher.default_model import default_model_path
from paceline.launcher.serving.app import create_app
from paceline.launcher.serving.engine_api import EngineInfo
from paceline.launcher.serving.http_protocol import HttpProtocol
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
            devices=("cpu · 2 threads",) * 2,
        )
        self.failure: str | None = None
        self.fails_after: int | None = None
        """The engine fails once it has said so many tokens."""
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
        self.views_taken = 0

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestEvent]:
        assert params.n == 1
        assert request_id not in self.running
        self.submitted.append((request_id, prompt_token_ids, params, priority, cache_salt))
        self.running[request_id] = params
        self.prompt_tokens += len(prompt_token_ids)
        return self._answer(request_id, prompt_token_ids, params)

    async def _answer(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestEvent, None]:
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
                    yield RequestEvent(
                        request_id, (), (), len(prompt), cached, "abort", None, RequestTimings(0.0, 0.01, 0.02, 1.0)
                    )
                    return
                ids = said[place : place + self.tokens_at_once]
                place += len(ids)
                self.generated += len(ids)
                if self.fails_after is not None and self.generated >= self.fails_after:
                    self.failure = "rank 3 died"
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
                yield RequestEvent(request_id, ids, logprobs, len(prompt), cached, reason, stop, timings, scored)
                if reason is not None:
                    return
                if params.grammar is not None and self.grammar_error is not None:
                    del self.running[request_id]
                    yield RequestEvent(request_id, (), (), len(prompt), cached, "error", error=self.grammar_error)
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
        times = StepTimes()
        for seconds in (0.0003, 0.004):
            times.plan.add(seconds)
        times.requests.add(3)
        times.tokens.add(64)
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
            step_seconds=times.parts(),
            step_requests=times.requests,
            step_tokens=times.tokens,
            ranks=[
                RankState(
                    rank,
                    weights_bytes=1000,
                    cache_bytes=2000,
                    workspace_bytes=30,
                    memory_total=9000,
                    memory_used=4000 + rank,
                    silence=0.25 * rank,
                    steps=7 - rank,
                )
                for rank in range(2)
            ],
        )

    async def view(self) -> EngineView:
        self.views_taken += 1
        return EngineView(
            taken=float(self.views_taken),
            stats=await self.stats(),
            block_holders=array("i", [FREE] * 1000 + [CACHED] * 20 + [0] * 4),
            requests=[RequestLine(name, slot, 9, 4, 9, 3, 4, 1.5) for slot, name in enumerate(self.running)],
            steps=[StepLine(step, step / 10, 3, 20 * (step % 5 == 0), 2) for step in range(7)],
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
        engine = EchoEngine(tokenizer.end_ids[0], len(with_tokenizer.backend or tokenizer.backend))
        return Served(engine, with_tokenizer, ServerSettings(**{"model_names": ("smol", "alias")} | settings))

    return make


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve()


QWEN_TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}For each function call return <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' }}{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}"""
"""As Qwen3's, for what matters here: the model itself writes <think>, or the template that there is nothing to it."""

R1_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
"""
"""As that of DeepSeek-R1's distillations, which opens the reasoning itself."""

LLAMA_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.tool_calls | default([]) | length > 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}
{%- endif %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
"""As Llama 3.2's."""

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>")


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Chat templates by how a model of theirs writes calls or reasoning."""
    unknown = QWEN_TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "")
    return {"hermes": QWEN_TEMPLATE, "llama": LLAMA_TEMPLATE, "unknown": unknown, "r1": R1_TEMPLATE}


@pytest.fixture(scope="session")
def follows() -> Callable[[Tokenizer, str, str], bool]:
    """follows(tokenizer, grammar, text): whether a whole answer is one that this grammar allows."""
    prepared = functools.cache(lambda backend: llguidance.hf.from_tokenizer(backend))

    def follow(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
        matcher = llguidance.LLMatcher(prepared(tokenizer.backend), grammar)
        assert not matcher.is_error(), matcher.get_error()
        return bool(matcher.consume_tokens(tokenizer.encode_rendered(text))) and matcher.is_accepting()

    return follow


@pytest.fixture(scope="session")
def speak() -> Callable[..., Tokenizer]:
    """speak(template, tags="special"): SmolLM2's tokenizer with this template.

    Its tags are special tokens, or tokens ("added"), or ordinary text ("text").
    """

    @functools.cache
    def make(template: str, *, tags: str = "added") -> Tokenizer:
        tokenizer = Tokenizer(default_model_path())
        if tags != "text":
            special = tags == "special"
            tokens = [AddedToken(tag, special=special, normalized=False) for tag in TAGS]
            tokenizer.backend.add_tokens(tokens, special_tokens=special)
        tokenizer.backend.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def pass_seconds() -> Callable[[float], None]:
    """pass_seconds(number): the running event loop's clock, by which requests time out, goes forward by so many."""

    def go_forward(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        clock = loop.time
        loop.time = lambda: clock() + seconds

    return go_forward


@pytest.fixture
def on_a_socket() -> Callable[[FastAPI], Any]:
    """on_a_socket(app): `async with` it, the application on uvicorn at the address it gives."""
    import uvicorn

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncGenerator[str, None]:
        config = uvicorn.Config(app, http=HttpProtocol, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
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


@pytest.fixture
def in_a_thread() -> Iterator[Callable[[FastAPI], str]]:
    """in_a_thread(app): the application on uvicorn beside this thread, which drives a browser; returns its address."""
    import uvicorn

    with contextlib.ExitStack() as stack:

        def run(app: FastAPI) -> str:
            server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
            thread = threading.Thread(target=server.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(setattr, server, "should_exit", True)
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.005)
            return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

        yield run
