"""A small HTTP/1.1 client for asyncio, cheap enough for thousands of streams from one process.

A connection is one protocol object: httptools reads what arrives in the event loop's own callback, and no task or queue
stands between the socket and whoever counts tokens. What such servers do not need is left out: proxies, redirects,
compression, HTTP/2.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools

from paceline.launcher.clients.address import Address
from paceline.launcher.json_text import parse_json

_WRONG_HOST = (62, 64)
"""Of OpenSSL's verify codes: the certificate is for another name, or for another address (x509_vfy.h)."""


class TransportError(Exception):
    """No whole answer came; `kind` says in a few words why, the same words for the same cause."""

    def __init__(self, kind: str, advice: str = "is a server running there?") -> None:
        super().__init__(kind)
        self.kind = kind
        self.advice = advice


@dataclass(slots=True)
class Response:
    """A whole answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: bytes = b""
    """Empty where it was given to on_body piece by piece."""

    def json(self) -> Any:
        """The body as JSON. Raises ValueError where it is none that can be read."""
        return parse_json(self.body)

    def error_fields(self) -> tuple[str, str | None, str | None]:
        """Message, param and code of an error, in whatever shape servers send theirs."""
        try:
            content = self.json()
        except ValueError:
            content = None
        error = content.get("error", content) if isinstance(content, dict) else None
        if not isinstance(error, dict):
            error = {"message": error} if isinstance(error, str) else {}
        message = error.get("message", error.get("detail"))
        text = message if isinstance(message, str) else f"HTTP status {self.status}"
        param, code = (str(value) if (value := error.get(name)) is not None else None for name in ("param", "code"))
        return text, param, code


class _Connection(asyncio.Protocol):
    """One connection, which carries one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._done: asyncio.Future[Response] | None = None
        self._response = Response()
        self._on_body: Callable[[bytes], None] | None = None
        self._pieces: list[bytes] = []
        self.closed = False
        self.answering = False
        """Whether any byte of the running exchange's answer has come."""

    @property
    def has_status(self) -> bool:
        """Whether the running exchange's answer has begun as HTTP."""
        return self._response.status != 0

    async def exchange(self, request: bytes, on_body: Callable[[bytes], None] | None) -> Response:
        """Send a request and read its answer. Raises TransportError."""
        if self._transport is None:
            raise TransportError("connection closed")
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._response, self._on_body, self._pieces = Response(), on_body, []
        self.answering = False
        self._transport.write(request)
        try:
            return await self._done
        finally:
            if not self._done.done() or self._done.cancelled():
                self.close()
            self._done = None

    def close(self) -> None:
        """Drop the connection; the server sees at once that nobody reads any more."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._done is None:  # nobody asked
            self.close()
            return
        self.answering = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(TransportError("answer is no HTTP"))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        headers = self._response.headers
        if error is None and self._response.status and not {"content-length", "transfer-encoding"} & headers.keys():
            self.on_message_complete()  # such an answer ends where the connection does
        else:
            self._fail(TransportError("connection closed before the end of the answer"))

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._on_body is None or self._response.status != 200:
            self._pieces.append(data)
            return
        try:
            self._on_body(data)
        except Exception as error:  # it must reach whoever waits, and would not through the parser
            self._fail(error)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._response.body = b"".join(self._pieces)
            self.closed = self.closed or not self._parser.should_keep_alive()
            self._done.set_result(self._response)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


class HttpClient:
    """Requests to one server over as many connections as run at once; idle ones are used again."""

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self.address = address
        self._tls = ssl.create_default_context() if address.tls else None
        self._idle: list[_Connection] = []
        key = "" if api_key is None else f"authorization: Bearer {api_key}\r\n"
        self._headers = f"host: {address.authority}\r\nuser-agent: paceline\r\naccept: */*\r\n{key}"

    async def get(self, path: str) -> Response:
        """GET a path such as /v1/models. Raises TransportError."""
        return await self._request(f"GET {self.address.prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode(), None)

    async def post(self, path: str, body: bytes, on_body: Callable[[bytes], None] | None = None) -> Response:
        """POST JSON; of an answer with status 200 on_body is given the pieces as they come.

        Raises TransportError, and whatever on_body raises. When cancelled the connection is dropped.
        """
        head = (
            f"POST {self.address.prefix}{path} HTTP/1.1\r\n{self._headers}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return await self._request(head.encode() + body, on_body)

    async def _request(self, request: bytes, on_body: Callable[[bytes], None] | None) -> Response:
        while True:
            connection = self._take_idle()
            reused = connection is not None
            if connection is None:
                connection = await self._connect()
            try:
                response = await connection.exchange(request, on_body)
            except TransportError as error:
                if reused and not connection.answering:
                    continue  # the server had closed it for being idle
                if not (connection.has_status or self.address.tls or self.address.unix_socket):
                    error.advice = (
                        "is a server running there, and one without TLS? With it the URL begins with https://"
                    )
                raise
            if not connection.closed:
                self._idle.append(connection)
            return response

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            if address.unix_socket is not None:
                _, connection = await loop.create_unix_connection(_Connection, address.unix_socket)
            else:
                _, connection = await loop.create_connection(_Connection, address.host, address.port, ssl=self._tls)
        except ssl.SSLCertVerificationError as error:
            advice = "SSL_CERT_FILE can name a file of CA certificates to trust"
            if error.verify_code in _WRONG_HOST:
                advice = "the URL must have a name that is in it"
            raise TransportError(f"certificate not trusted: {error.verify_message}", advice) from error
        except ssl.SSLError as error:
            words = f"no TLS: {error.reason or 'unknown reason'}"
            raise TransportError(words, "does it serve plain HTTP? Then the URL begins with http://") from error
        except ConnectionRefusedError as error:
            raise TransportError("connection refused") from error
        except OSError as error:
            raise TransportError(f"cannot connect ({error.strerror or error})") from error
        return connection

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().close()
