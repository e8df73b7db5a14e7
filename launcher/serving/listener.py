"""The socket that clients connect to, and the files that guard it: each is looked at before anything is started."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path

from paceline.coordinator.errors import InputError


def listen(host: str, port: int, uds: Path | None) -> socket.socket:
    """A listening TCP socket (port 0: a free one), or a Unix one where uds names a path.

    Raises InputError where the address cannot be had.
    """
    if uds is not None:
        return _listen_unix(uds)
    if not 0 <= port <= 65_535:
        raise InputError(f"--port must be from 0 to 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:  # the latter: a host that is no name at all
        raise InputError(
            f"cannot listen on {host} port {port} ({_reason(error)}); choose others with --host and --port"
        ) from error


def _reason(error: Exception) -> str:
    """What the system says; Python adds the address to some of its texts. An unknown host has an errno of its own."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error)


def _listen_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead_socket(path)
        listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        raise InputError(f"cannot listen on --uds {path} ({_reason(error)}); choose another path") from error
    listener.listen(2048)
    return listener


def _remove_dead_socket(path: Path) -> None:
    """Make way where a server that is gone has left its socket; of anything else bind() says that it is in the way."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(os.fspath(path))
                except ConnectionRefusedError:
                    path.unlink()


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """Where clients find the server."""
    scheme = "https" if tls else "http"
    if listener.family == socket.AF_UNIX:
        return f"{scheme}+unix://{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


API_KEYS_VARIABLE = "PACELINE_API_KEYS"


def api_keys(path: Path | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys that requests may bear, of a file and of the environment; none where neither is given.

    Raises InputError where one of them is given and has no key: a server that was to ask for one must not go without.
    """
    keys = () if path is None else _keys_of_file(path)
    if API_KEYS_VARIABLE in environment:
        named = tuple(environment[API_KEYS_VARIABLE].replace(",", " ").split())
        if not named or not all(key.isascii() for key in named):
            raise InputError(f"{API_KEYS_VARIABLE} must hold keys of ASCII characters, separated by commas")
        keys += named
    return keys


def _keys_of_file(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and those that begin with # are passed over."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
    except UnicodeDecodeError as error:
        raise InputError(f"--api-key-file {path} must hold keys of ASCII characters, one a line") from error
    except OSError as error:
        raise InputError(f"--api-key-file {path} cannot be read ({_reason(error)}); name a file of keys") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise InputError(f"--api-key-file {path} holds no key; write one a line, none that begins with #")
    return keys


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raise InputError where TLS files are given that cannot be used."""
    if certificate is None:
        if key is not None:
            raise InputError("--ssl-keyfile needs --ssl-certfile beside it")
        return
    if key is None and _lacks_key(certificate):
        raise InputError(f"--ssl-certfile {certificate} holds no private key; give --ssl-keyfile")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password would be asked for on the terminal, and again in another process.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = f"--ssl-certfile {certificate}" + (f" and --ssl-keyfile {key}" if key is not None else "")
        raise InputError(
            f"{files} cannot be used ({_tls_reason(error)}); give a PEM certificate and its key without a password"
        ) from error


def _lacks_key(certificate: Path) -> bool:
    """Whether a file is a PEM certificate alone."""
    try:
        content = certificate.read_bytes()
    except OSError:
        return False  # it is said what is wrong when it is loaded
    return b"-----BEGIN CERTIFICATE-----" in content and b"PRIVATE KEY-----" not in content


def _tls_reason(error: Exception) -> str:
    """What OpenSSL or the system says, without the place in their sources."""
    if isinstance(error, ssl.SSLError):
        return error.reason.replace("_", " ").lower() if error.reason else "no PEM that OpenSSL can read"
    return _reason(error)
