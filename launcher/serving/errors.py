"""What a client is told when a request is not served: always the shape of OpenAI's errors, never a Python text.

{"error": {"message": …, "type": …, "param": the field at fault or null, "code": … or null}}
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from paceline.coordinator.errors import EngineError, InputError
from paceline.launcher.json_log import log_event

LOGGER = logging.getLogger("paceline.serving")

RETRY_AFTER_S = 1
"""What a client that came at a bad moment is asked to wait."""

CLIENT_GONE = 499
"""The status that the log and the metrics have for a client that left before its answer began (nginx's)."""

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_UNION_TAG = re.compile(r"str|int|float|bool|(list|dict|literal|constrained-\w+|function-\w+)\[.*\]|[A-Z]\w*")


# By pydantic's types of errors: https://docs.pydantic.dev/latest/errors/validation_errors/
_WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of ordinary size",
    "int_type": "a whole number",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "string_too_long": "a text of at most {max_length} characters",
    "string_too_short": "a text of at least {min_length} characters",
    "string_type": "a text",
    "string_unicode": "a text of whole Unicode characters",
    "too_long": "a list of at most {max_length} entries",
    "too_short": "a list of at least {min_length} entries",
    "union_tag_invalid": "of a kind among {expected_tags}",
    "union_tag_not_found": "an object with {discriminator}",
}


class ApiError(Exception):
    """A request that is not served, as its client is told."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def kind(self) -> str:
        """OpenAI's word for errors of this status."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def reason(self) -> str:
        """What it is counted as: its code, or its kind where it has none."""
        return self.code or self.kind

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer; 429 and 503 ask to come back."""
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        # Escaped to ASCII, since a message may quote half characters that the client sent.
        content = json.dumps(self.body()).encode()
        return Response(content, self.status, headers, media_type="application/json")


class ClientGone(ApiError):
    """The client has closed its connection, so there is nobody to answer."""

    def __init__(self) -> None:
        super().__init__(CLIENT_GONE, "the client left", code="client_gone")


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def missing(param: str) -> ApiError:
    """A 400 for a field that is not there."""
    return bad_request(f"{param} is missing", param, "missing_required_parameter")


def field_at_fault(message: str, fields: Iterable[str]) -> str | None:
    """The field that a message names first, as those of InputError do."""
    places = [(found.start(), -len(field), field) for field in fields if (found := re.search(rf"\b{field}\b", message))]
    return min(places)[2] if places else None


def to_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """What the client is told of any exception; what it is not told goes to the log under request_id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return bad_request(str(error), None)
    if isinstance(error, EngineError):
        log_event(LOGGER, "request_failed_with_the_engine", logging.ERROR, request_id=request_id, error=str(error))
        return ApiError(503, "the engine has failed; the server's log says why", code="engine_failed")
    if isinstance(error, HTTPException):
        return _from_http(error)
    log_event(LOGGER, "request_failed", logging.ERROR, exc_info=error, request_id=request_id)
    return ApiError(500, f"internal error; the server's log has more under request id {request_id}")


def _from_http(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return ApiError(404, "there is no such path here", code="unknown_url")
    if error.status_code == 405:
        return ApiError(405, "this path does not take this method", code="method_not_supported")
    return ApiError(error.status_code, "the request was refused")


def no_object() -> ApiError:
    """A 400 for a body that is none at all, or is something else."""
    message = "the body must be a JSON object, sent with the header content-type: application/json"
    return bad_request(message, None, "invalid_json")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """A 400 of pydantic's errors of a body: the first field at fault, with all that could have stood there."""
    first = errors[0]
    param = _param(first["loc"], first["type"])
    # Of a field that may be of several kinds, the one that was meant is the one that got further.
    for each in errors:
        if param and (inner := _param(each["loc"], each["type"])).startswith((f"{param}[", f"{param}.")):
            first, param = each, inner
    if not param:
        return no_object()
    if first["type"] == "extra_forbidden":
        return bad_request(f"unknown field {param!r}", param, "unknown_parameter")
    if first["type"] == "missing":
        return missing(param)
    wanted = dict.fromkeys(_wanted(each) for each in errors if _param(each["loc"], each["type"]) == param)
    return bad_request(f"{param} must be {' or '.join(wanted)}", param)


def _wanted(error: Mapping[str, Any]) -> str:
    """What pydantic expected at a place, in words that say it to somebody who wrote JSON."""
    words = _WANTED.get(error["type"])
    said = "of another kind" if words is None else words.format(**error.get("ctx", {}))
    return said.replace(" 1 entries", " 1 entry").replace(" 1 characters", " 1 character")


def _param(location: Sequence[int | str], kind: str) -> str:
    """messages[0].content of ("messages", 0, "content", "str"), whose last part says what did not match."""
    path = ""
    for place, part in enumerate(location, 1):
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _UNION_TAG.fullmatch(part) or (kind == "extra_forbidden" and place == len(location)):
            path += f".{part}" if path else part
    return path
