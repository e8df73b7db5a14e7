"""What every HTTP request passes first: its id, its key, its size; and last: its errors and its log line."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.launcher.json_log import log_event
from paceline.launcher.serving.errors import ApiError, ClientGone, to_api_error
from paceline.launcher.serving.hosts import host_name, is_loopback
from paceline.launcher.serving.metrics import ServerMetrics
from paceline.launcher.serving.record import RequestRecord
from paceline.launcher.serving.settings import ServerSettings

if TYPE_CHECKING:
    from paceline.launcher.serving.tracing import Tracing

LOGGER = logging.getLogger("paceline.serving")

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Whoever watches the process needs no key."""

QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/v1/load", "/v1/engine"})
"""Asked again and again by machines: a good answer is no news for the log."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")


class Gate:
    """Middleware around the whole application.

    Where hosts are named, requests to others are refused. Every path but OPEN_PATHS and the page's needs a key where
    there are keys, paths that do not exist too; OPTIONS needs none. The body is read here up to its limit, before
    anything is parsed. An x-request-id of the client's is kept.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        metrics: ServerMetrics,
        tracing: Tracing | None,
        paths: frozenset[str],
        page_paths: frozenset[str],
    ) -> None:
        """paths: those that are counted by name; page_paths: the page's files, which are counted together."""
        self._app = app
        self._hosts = frozenset(settings.allowed_hosts)
        self._page_paths = page_paths
        self._open_paths = OPEN_PATHS | page_paths
        self._body_limit = settings.body_limit
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self._log_prompts = settings.log_prompts
        self._metrics = metrics
        self._tracing = tracing
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        record = RequestRecord(_request_id(headers.get(b"x-request-id")), scope["method"], scope["path"])
        scope.setdefault("state", {})["record"] = record

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            self._check_host(headers)
            self._check_key(scope, headers)
            body = await self._read_body(headers, receive)
            await self._app(scope, _replay(body, receive), send_on)
        except ClientGone as gone:
            record.error = gone
            record.status = record.status or gone.status
        except Exception as error:
            record.error = to_api_error(error, record.request_id)
            if record.status == 0:
                await record.error.response()(scope, receive, send_on)
        finally:
            self._take_down(record, headers)

    def _take_down(self, record: RequestRecord, headers: dict[bytes, bytes]) -> None:
        """Count a request that has ended, trace it, and log it where it is worth a line."""
        is_page = record.path in self._page_paths
        path = "page" if is_page else record.path if record.path in self._paths else "other"
        self._metrics.count_request(record, path)
        if self._tracing is not None:
            record.trace_id = self._tracing.record(record, headers)
        if record.error is not None or not (is_page or record.path in QUIET_PATHS):
            log_event(LOGGER, "request", **record.log_fields(with_prompts=self._log_prompts))

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        given = headers.get(b"host")
        if not self._hosts or given is None:  # every browser names one
            return
        host = host_name(given.decode("latin-1"))
        if host not in self._hosts and not is_loopback(host):
            raise ApiError(
                403, "this server does not answer to this host name; --allowed-host NAME lets it", code="host_refused"
            )

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if not self._keys or scope["path"] in self._open_paths or scope["method"] == "OPTIONS":
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        # All keys are compared, each in constant time, so that the time taken says nothing about any.
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != b"bearer":
            raise ApiError(
                401, "this server needs an API key: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
        if not any(matches):
            raise ApiError(401, "this API key is not one of the server's", code="invalid_api_key")

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._body_limit:
            raise self._too_large()
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > self._body_limit:
                raise self._too_large()
            more = message.get("more_body", False)
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body may have at most {self._body_limit} bytes", code="body_too_large")


def _request_id(given: bytes | None) -> str:
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return uuid.uuid4().hex


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body that was read already, and then what comes after it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
