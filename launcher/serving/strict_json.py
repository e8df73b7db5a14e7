"""Bodies as JSON, read strictly, and as what their endpoint takes.

A key that comes twice is an error, since parsers disagree on which of the two counts. So is a text with half of a
surrogate pair, which JSON can write as "\\ud800": it can neither be tokenised nor sent back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from paceline.launcher.serving.errors import bad_request, from_validation, no_object

_MAY_HOLD_HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\x00")
"""Whole pairs and some other texts match too. Zeros are in UTF-16 and UTF-32, where halves look otherwise."""
_HALF = re.compile("[\ud800-\udfff]")


class StrictJsonRoute(APIRoute):
    """A route whose endpoint takes a `body`, which is read so, and maybe the `request`, and nothing else.

    FastAPI finds and describes it; its own way to the endpoint leads past all that one may depend on, which takes a
    tenth of the time to the first token.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hints = get_type_hints(self.endpoint)
        self._model: type[BaseModel] = hints["body"]
        self._takes_request = "request" in hints
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        read = _read(await request.body(), request.headers.get("content-type", ""))
        try:
            body = self._model.model_validate(read)
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False)) from None
        answer = await (self.endpoint(body, request) if self._takes_request else self.endpoint(body))
        response = answer if isinstance(answer, Response) else JSONResponse(answer)
        await response(scope, receive, send)


def _read(body: bytes, content_type: str) -> Any:
    """What it says. Raises ApiError (400) where it is no JSON, and naming what comes twice or is no Unicode text."""
    kind, _, subkind = content_type.partition(";")[0].strip().lower().partition("/")
    if not body or kind != "application" or not (subkind == "json" or subkind.endswith("+json")):
        raise no_object()
    try:
        read = json.loads(body, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is no valid JSON at character {error.pos}", None, "invalid_json") from None
    except (ValueError, RecursionError):  # no UTF-8, numbers of thousands of digits, lists in lists without end
        raise bad_request("the body is no JSON that can be read", None, "invalid_json") from None
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
