"""uvicorn's HTTP/1.1 over httptools, with this server's errors."""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.launcher.serving.errors import bad_request


class HttpProtocol(HttpToolsProtocol):
    """One connection. What is no HTTP that can be read never becomes a request, so it is answered here."""

    def send_400_response(self, msg: str) -> None:
        """uvicorn's hook; the connection ends with it, since nobody knows where the next request begins."""
        error = bad_request(
            "this is no HTTP/1.1 that can be read; is its URL longer than 65,535 bytes?", None, "invalid_http"
        )
        content = json.dumps(error.body()).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + content)
        self.transport.close()
