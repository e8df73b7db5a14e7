"""Bodies as JSON, in which a key that comes twice is an error: parsers disagree on which of the two counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from paceline.launcher.serving.errors import bad_request


class StrictJsonRoute(APIRoute):
    """A route whose body is read so; for routers that take bodies."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's hook for requests of another class."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        """The body. Raises json.JSONDecodeError, or ApiError (400) naming a key that comes twice."""
        return json.loads(await self.body(), object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise bad_request(f"the key {key!r} comes twice in one object", key, "duplicate_key")
    return made
