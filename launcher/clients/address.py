"""Where a server is: from the URL that a person gives to what a connection needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from paceline.coordinator.errors import InputError

_SCHEMES = {"http": (80, False), "https": (443, True)}
KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Address:
    """A server, over TCP or at a Unix socket."""

    host: str
    port: int
    tls: bool
    prefix: str = ""
    """What its paths begin with, before /v1; without a slash at its end."""
    unix_socket: str | None = None
    """Path of a Unix socket to connect to instead; host and port are then only what the request says."""

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.tls else 80
        return host if self.port == default else f"{host}:{self.port}"

    def __str__(self) -> str:
        if self.unix_socket is not None:
            return f"http+unix://{self.unix_socket}"
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"


def parse_url(url: str) -> Address:
    """The server of a URL such as http://127.0.0.1:8000, with or without /v1, or http+unix:///path/of/socket.

    Raises InputError where it is none.
    """
    bad = InputError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
    if url.startswith("http+unix://"):
        path = url.removeprefix("http+unix://")
        if not path.startswith("/"):
            raise bad
        return Address("localhost", 80, False, unix_socket=path)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # a port that is no number, a bracket that is not closed
        raise bad from error
    if parts.scheme not in _SCHEMES or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise bad
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise bad
    default, tls = _SCHEMES[parts.scheme]
    return Address(parts.hostname, port or default, tls, parts.path.rstrip("/").removesuffix("/v1"))


def api_key(given: str | None) -> str | None:
    """The key to send: the one given, or the environment's. Raises InputError where it can be no header."""
    key = os.environ.get(KEY_VARIABLE) if given is None else given
    if not key:
        return None
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise InputError(f"the API key (--api-key or {KEY_VARIABLE}) must be printable ASCII without spaces")
    return key
