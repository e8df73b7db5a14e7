"""The lines of OpenAI's batch files: requests in, results out.

In: {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}. Out: {"id", "custom_id", "response":
{"status_code", "request_id", "body"} or null, "error": null or {"code", "message"}}.
Source: platform.openai.com/docs/guides/batch.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from paceline.launcher.json_text import parse_json

if TYPE_CHECKING:
    from paceline.launcher.clients.http import Response

_URL = re.compile(r"/v1(?:/[a-z_]+)+")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that can be sent."""

    number: int
    """Of its line, from 1."""
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that can not."""

    number: int
    custom_id: str | None
    """None where it has none that is a text."""
    message: str


def read_line(number: int, data: bytes) -> BatchRequest | BadLine:
    """One line of the input."""
    try:
        line = parse_json(data)
    except ValueError:  # UnicodeDecodeError is one
        return BadLine(number, None, "it is no JSON that can be read")
    if not isinstance(line, dict):
        return BadLine(number, None, "it must be a JSON object")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(number, None, "custom_id must be a text")
    unknown = sorted(line.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        return BadLine(number, custom_id, f"unknown field {unknown[0]!r}")
    if line.get("method") != "POST":
        return BadLine(number, custom_id, "method must be 'POST'")
    url = line.get("url")
    if not isinstance(url, str) or not _URL.fullmatch(url):
        return BadLine(number, custom_id, "url must be a path such as /v1/chat/completions")
    body = line.get("body")
    if not isinstance(body, dict):
        return BadLine(number, custom_id, "body must be a JSON object")
    if body.get("stream"):
        return BadLine(number, custom_id, "body.stream must be false: results are whole answers")
    return BatchRequest(number, custom_id, url, json.dumps(body).encode())


def key_of(custom_id: str | None, number: int) -> int:
    """What tells a line from all others in 128 bits: its custom_id or, where it has none, its number."""
    name = f"line {number}" if custom_id is None else f"id {custom_id}"
    return xxhash.xxh3_128_intdigest(name.encode(errors="surrogatepass"))


def result_line(request: BatchRequest, response: Response) -> bytes:
    """A server's answer, refusals included."""
    try:
        body = response.json()
    except ValueError:
        body = {"error": {"message": response.error_fields()[0]}}
    answer = {"status_code": response.status, "request_id": response.headers.get("x-request-id", ""), "body": body}
    return _line(request.custom_id, answer, None)


def bad_line(bad: BadLine) -> bytes:
    """The result of a line that cannot be sent."""
    error = {"code": "invalid_line", "message": f"line {bad.number}: {bad.message}", "line": bad.number}
    return _line(bad.custom_id, None, error)


def _line(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass") + b"\n"


def read_result(data: bytes) -> tuple[int, bool]:
    """The key of the line that a result belongs to, and whether it failed. Raises ValueError where it is no result."""
    line = parse_json(data)
    if not isinstance(line, dict) or not {"custom_id", "response", "error"} <= line.keys():
        raise ValueError("it is no result")
    response, error = line["response"], line["error"]
    failed = not isinstance(response, dict) or response.get("status_code") != 200
    if isinstance(line["custom_id"], str):
        return key_of(line["custom_id"], 0), failed
    if not isinstance(error, dict) or not isinstance(error.get("line"), int):
        raise ValueError("it has neither a custom_id nor a line number")
    return key_of(None, error["line"]), failed
