"""The server under load: which fields it takes, how it counts tokens, and the body of every request to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.coordinator.errors import InputError
from paceline.launcher.bench.plan import PlannedRequest
from paceline.launcher.bench.prompts import Encode, PromptMaker, one_token_words
from paceline.launcher.bench.records import RequestRecord
from paceline.launcher.clients.http import HttpClient, Response, TransportError
from paceline.launcher.clients.server import choose_model, refusal, unreachable

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
WISHES = ("ignore_eos", "min_tokens", "skip_special_tokens", "continuous_usage_stats")
"""Fields beyond OpenAI's, each left out where the server refuses it: the first two make answers as long as planned, the
third lets every token have a text, the last tells how many tokens each event stands for."""


class Target:
    """Made by `find_target`."""

    def __init__(self, client: HttpClient, model: str, endpoint: str, maker: PromptMaker, temperature: float) -> None:
        self.client = client
        self.model = model
        self.path = PATHS[endpoint]
        self.max_model_len: int | None = None
        """Tokens of prompt and answer together, where the server says."""
        self.wishes = list(WISHES)
        """Those of WISHES that the server takes."""
        self._chat = endpoint == "chat"
        self._maker = maker
        self._temperature = temperature

    def fits(self, plan: PlannedRequest) -> bool:
        """Whether the model is long enough for a request."""
        return self.max_model_len is None or plan.prompt_tokens + plan.output_tokens <= self.max_model_len

    def body(self, plan: PlannedRequest) -> bytes:
        """The request as JSON."""
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": self._temperature,
            "max_tokens": plan.output_tokens,
        }
        if "ignore_eos" in self.wishes:
            fields["ignore_eos"] = True
        if "min_tokens" in self.wishes:
            fields["min_tokens"] = plan.output_tokens
        if "skip_special_tokens" in self.wishes:
            fields["skip_special_tokens"] = False
        if "continuous_usage_stats" in self.wishes:
            fields["stream_options"]["continuous_usage_stats"] = True
        head = json.dumps(fields).encode()[:-1]
        prompt = self._maker.prompt(plan)
        if self._chat:
            return b'%b, "messages": [{"role": "user", "content": "%b"}]}' % (head, prompt)
        return b'%b, "prompt": [%b]}' % (head, prompt)

    async def agree_on_fields(self) -> None:
        """Ask for a few tokens, leaving out of `wishes` what the server does not take.

        Raises InputError or EngineError, with the server's own words, where it does not answer even so.
        """
        plan = PlannedRequest(-1, 0.0, self._maker.overhead + 8, 2)

        def take(data: bytes) -> None:
            record.feed(data, 0.0)

        while True:
            record = RequestRecord(plan)
            try:
                response = await self.client.post(self.path, self.body(plan), take)
            except TransportError as error:
                raise unreachable(error, self.client.address) from error
            if response.status == 200:
                break
            refused = self._refused_wishes(response)
            if not refused:
                raise refusal(response, self.client.address)
            self.wishes = [wish for wish in self.wishes if wish not in refused]
        if record.error or not record.done:
            reason = record.error or "its answer was no stream of events that ends with [DONE]"
            raise InputError(f"{self.client.address}{self.path} cannot be measured: {reason}")

    def _refused_wishes(self, response: Response) -> Sequence[str]:
        """What a refusal names of the wishes; all of them where it names none and may still mean them."""
        if response.status not in (400, 422):
            return []
        text = response.body.decode(errors="replace")
        return [wish for wish in self.wishes if wish in text] or self.wishes


async def find_target(
    client: HttpClient, *, model: str | None, endpoint: str, tokenizer: str | None, seed: int, temperature: float
) -> Target:
    """Look at the server, and learn to make prompts of exact lengths for it.

    tokenizer: a folder or Hugging Face id, for servers without /tokenize. Raises InputError or EngineError.
    """
    described = await choose_model(client, model)
    name = str(described["id"])
    encode = _server_encoder(client, name) if tokenizer is None else _local_encoder(tokenizer)
    words, ids = await one_token_words(encode)
    if endpoint == "chat":
        overhead = 0 if tokenizer is not None else await _template_tokens(client, name, words[0])
        maker = PromptMaker(words, " ", seed, overhead=overhead)
    else:
        maker = PromptMaker([str(token) for token in ids], ",", seed)
    target = Target(client, name, endpoint, maker, temperature)
    length = described.get("max_model_len")
    target.max_model_len = length if isinstance(length, int) else None
    await target.agree_on_fields()
    return target


async def _tokenize(client: HttpClient, fields: Mapping[str, Any]) -> Sequence[int]:
    try:
        response = await client.post("/tokenize", json.dumps(fields).encode())
    except TransportError as error:
        raise unreachable(error, client.address) from error
    if response.status >= 500:
        raise refusal(response, client.address)
    try:
        if response.status != 200:
            raise ValueError(response.error_fields()[0])
        tokens = response.json()["tokens"]
        if not isinstance(tokens, list):
            raise ValueError("tokens is no list")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{client.address}/tokenize does not tell token ids ({error}); name the model's tokenizer with --tokenizer"
        ) from error
    return tokens


def _server_encoder(client: HttpClient, model: str) -> Encode:
    async def encode(text: str) -> Sequence[int]:
        return await _tokenize(client, {"model": model, "prompt": text, "add_special_tokens": False})

    return encode


async def _template_tokens(client: HttpClient, model: str, word: str) -> int:
    """How many tokens the chat template adds to a message of words."""
    message = {"role": "user", "content": f"{word} {word}"}
    return len(await _tokenize(client, {"model": model, "messages": [message]})) - 2


def _local_encoder(name: str) -> Encode:
    # Only here: transformers takes seconds to import.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"--tokenizer {name} cannot be loaded: {reason}") from error

    async def encode(text: str) -> Sequence[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode
