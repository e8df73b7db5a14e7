"""/openapi.json as it is true of this server: FastAPI's own words, and the answers and errors it cannot know.

https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from paceline.launcher.serving.gate import OPEN_PATHS
from paceline.launcher.serving.settings import ServerSettings

_ERRORS = {
    400: "A field at fault, or a body that is no JSON object",
    401: "A missing or wrong key",
    404: "An unknown path or model",
    413: "A body over the limit",
    429: "As many answers are accepted as the queue takes; come back after Retry-After",
    500: "A fault of the server's",
    503: "Not ready, shutting down, or failed; come back after Retry-After",
    504: "Out of time",
}
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_MAYBE_TEXT = {"type": ["string", "null"]}
_SCHEMAS: dict[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {"message": _TEXT, "type": _TEXT, "param": _MAYBE_TEXT, "code": _MAYBE_TEXT},
            }
        },
    },
    "Response": {
        "type": "object",
        "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
        "properties": {
            "id": _TEXT,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "status": {"enum": ["completed", "incomplete"]},
            "model": _TEXT,
            "output": {"type": "array", "items": {"type": "object", "required": ["type"]}},
            "usage": {"type": "object", "required": ["input_tokens", "output_tokens", "total_tokens"]},
        },
    },
    "Usage": {
        "type": "object",
        "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
        "properties": {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
    },
}
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": _TEXT, "event": _TEXT}}
"""One of a stream, in the words that OpenAPI has for it since 3.2; readers of 3.1 pass them over."""
_ANSWERS = {
    "/v1/chat/completions": "ChatCompletion",
    "/v1/completions": "TextCompletion",
    "/v1/responses": "Response",
}
"""Paths whose answers come whole, or as events where `stream` is true, by the schema of the whole answer."""


def describe(app: FastAPI, settings: ServerSettings) -> None:
    """Have the application describe itself truthfully."""
    written = app.openapi()
    schemas = written["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's, whose shape and status are not ours
        schemas.pop(name, None)
    schemas |= _SCHEMAS | {
        "ChatCompletion": _completion(
            "chat.completion", {"message": {"type": "object", "required": ["role", "content"]}}
        ),
        "TextCompletion": _completion("text_completion", {"text": _TEXT}),
    }
    for path, operations in written["paths"].items():
        for method, operation in operations.items():
            _describe_operation(path, method, operation, with_keys=bool(settings.api_keys))
    if settings.api_keys:
        written["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        written["security"] = [{"key": []}]


def _describe_operation(path: str, method: str, operation: dict[str, Any], *, with_keys: bool) -> None:
    statuses = [500, 503]
    if method == "post":
        statuses += [400, 413]
    if method == "post" or "{" in path:
        statuses.append(404)
    if path in _ANSWERS:
        statuses += [429, 504]
        operation["responses"]["200"] = {
            "description": "The answer: whole, or with stream as events of `data: ` and an object, the last [DONE]",
            "content": {
                "application/json": {"schema": _reference(_ANSWERS[path])},
                "text/event-stream": {"itemSchema": _EVENT},
            },
        }
    if path in OPEN_PATHS:
        operation["security"] = []
    elif with_keys:
        statuses.append(401)
    operation["responses"].pop("422", None)
    for status in sorted(statuses):
        content = {"application/json": {"schema": _reference("Error")}}
        operation["responses"][str(status)] = {"description": _ERRORS[status], "content": content}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _completion(kind: str, part: dict[str, Any]) -> dict[str, Any]:
    """The schema of a whole answer, whose choices have this part."""
    choice = {
        "type": "object",
        "required": ["index", *part, "logprobs", "finish_reason"],
        "properties": {"index": _COUNT, **part, "finish_reason": _TEXT},
    }
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "choices": {"type": "array", "minItems": 1, "items": choice},
            "usage": _reference("Usage"),
        },
    }
