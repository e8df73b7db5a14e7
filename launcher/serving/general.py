"""The routes that answer at once: models, health, load, metrics, tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from paceline.launcher.serving.door import Door
from paceline.launcher.serving.errors import ApiError, bad_request
from paceline.launcher.serving.exposition import CONTENT_TYPE
from paceline.launcher.serving.prompts import Prompt, check_token_ids
from paceline.launcher.serving.schemas import DetokenizeBody, TokenizeBody
from paceline.launcher.serving.strict_json import StrictJsonRoute
from paceline.launcher.serving.tool_use import read_tools


def watch_routes(door: Door) -> APIRouter:
    """What operators and load balancers ask."""
    router = APIRouter()

    @router.get("/health")
    @router.head("/health")
    async def health() -> dict[str, str]:
        """Live: the process answers, and its engine has not failed."""
        if door.engine.failure is not None:
            door.ready_engine()
        return {"status": "ok"}

    @router.get("/ready")
    @router.head("/ready")
    async def ready() -> dict[str, str]:
        """Ready: requests are accepted."""
        door.ready_engine()
        door.admission.check_open()
        return {"status": "ready"}

    @router.get(
        "/metrics",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        response_class=Response,
    )
    async def metrics() -> Response:
        """Prometheus' text format."""
        try:
            stats = await door.engine_stats()
        except ApiError:  # which paceline_engine_up tells; the HTTP side's own numbers are still worth having
            stats = None
        return Response(door.exposition.text(door.engine.info, stats), media_type=CONTENT_TYPE)

    @router.get("/v1/load")
    async def load() -> dict[str, Any]:
        """How busy the server is now."""
        stats = await door.engine_stats()
        blocks = stats.blocks
        return {
            "accepted": door.admission.accepted,
            "max_queue": door.admission.limit,
            "running": stats.running,
            "waiting": stats.waiting,
            "cache_blocks": {"free": blocks.free, "cached": blocks.cached, "used": blocks.used},
            "cache_usage": blocks.used / max(blocks.free + blocks.cached + blocks.used, 1),
            "prefix_cache_hit_ratio": stats.cached_prompt_tokens / max(stats.prompt_tokens, 1),
        }

    return router


def model_routes(door: Door) -> APIRouter:
    """What models there are."""
    router = APIRouter()

    def describe(name: str) -> dict[str, Any]:
        info = door.engine.info
        return {
            "id": name,
            "object": "model",
            "created": door.started,
            "owned_by": "paceline",
            "root": door.model_name,
            "max_model_len": None if info is None else info.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """All names of the model."""
        return {"object": "list", "data": [describe(name) for name in door.settings.model_names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        door.check_model(name)
        return describe(name)

    return router


def token_routes(door: Door) -> APIRouter:
    """Text to token ids and back."""
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """The token ids that a prompt or a conversation would run as."""
        info = door.ready_engine()
        door.check_model(body.model)
        token_ids = (await _prompt(door, body)).token_ids
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": info.max_model_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = [door.token_texts[token_id][0] for token_id in token_ids]
        return answer

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        """The text of token ids, special tokens included."""
        info = door.ready_engine()
        door.check_model(body.model)
        if not isinstance(body.tokens, list):
            raise bad_request("tokens must be a list of token ids", "tokens")
        check_token_ids(body.tokens, info, "tokens")
        if door.tokenizer.backend is None:
            raise bad_request("this model has no tokenizer", "tokens")
        return {"prompt": door.token_texts.decode(body.tokens)}

    return router


async def _prompt(door: Door, body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        use = read_tools([tool.function for tool in body.tools or ()], None, None, door.dialect)
        return await door.prompts.chat(body.messages, body.chat_template_kwargs, () if use is None else use.told)
    if body.tools is not None:
        raise bad_request("tools need messages", "tools")
    return await door.prompts.text(body.prompt or "", "prompt", special_tokens=body.add_special_tokens)
