"""Bodies as JSON, read strictly.

A key that comes twice is an error, since parsers disagree on which of the two counts. So is a text with half of a
surrogate pair, which JSON can write as "\\ud800": it can neither be tokenised nor sent back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from paceline.launcher.serving.errors import bad_request

_MAY_HOLD_HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\x00")
"""Whole pairs and some other texts match too. Zeros are in UTF-16 and UTF-32, where halves look otherwise."""
_HALF = re.compile("[\ud800-\udfff]")


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
        """The body. Raises json.JSONDecodeError, or ApiError (400) naming what comes twice or is no Unicode text."""
        body = await self.body()
        read = json.loads(body, object_pairs_hook=_object)
        if _MAY_HOLD_HALVES.search(body):
            for path in _halves(read, ""):
                what = path or "a key of the body"
                raise bad_request(f"{what} is no valid Unicode text: it holds half of a surrogate pair", path or None)
        return read


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise bad_request(f"the key {key!r} comes twice in one object", key, "duplicate_key")
    return made


def _halves(value: Any, path: str) -> Iterator[str]:
    """Where texts hold half a pair, as messages[0].content; of a key it is the object's place."""
    if isinstance(value, str):
        if _HALF.search(value):
            yield path
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _halves(each, f"{path}[{place}]")
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _halves(key, path)
            yield from _halves(each, f"{path}.{key}" if path else key)
