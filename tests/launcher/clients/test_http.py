"""The HTTP client against servers that write exactly what they are told to."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paceline.coordinator.errors import InputError
from paceline.launcher.clients.address import Address, api_key, parse_url
from paceline.launcher.clients.http import HttpClient, TransportError
from paceline.launcher.clients.server import unreachable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return head + await reader.readexactly(int(length or 0))


@asynccontextmanager
async def server(*answers: bytes, close: bool = False) -> AsyncIterator[tuple[HttpClient, list[bytes]]]:
    """A client of a server that answers requests with these, whatever they ask; close: after each of them."""
    left, seen = list(answers), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(b"connection")
        try:
            while left:
                seen.append(await read_request(reader))
                writer.write(left.pop(0))
                if close:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as running:
        client = HttpClient(parse_url(f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}/base/v1/"), "key")
        yield client, seen
        client.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def test_a_connection_is_used_again() -> None:
    async with server(OK, OK) as (client, seen):
        assert (await client.get("/v1/models")).json() == {}
        response = await client.post("/v1/x", b"[1]")
        assert (response.status, response.body) == (200, b"{}")
        assert seen.count(b"connection") == 1
        assert seen[1].startswith(b"GET /base/v1/models HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nauthorization: Bearer key\r\n" in seen[1]
        assert seen[2].endswith(b"\r\ncontent-length: 3\r\n\r\n[1]")


async def test_a_connection_that_the_server_closed_meanwhile_is_no_error() -> None:
    async with server(OK, OK, close=True) as (client, seen):
        for _ in range(2):
            assert (await client.get("/v1/models")).status == 200
        assert seen.count(b"connection") == 2


async def test_chunks_and_answers_that_end_with_their_connection() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    endless = b"HTTP/1.1 200 OK\r\n\r\nall of it"
    async with server(chunked, endless) as (client, _):
        pieces: list[bytes] = []
        response = await client.post("/v1/x", b"{}", pieces.append)
        assert (pieces, response.body) == ([b"abc", b"de"], b"")
        assert (await client.get("/v1/x")).body == b"all of it"


async def test_a_refusal_is_kept_from_who_reads_a_stream() -> None:
    refused = b'HTTP/1.1 400 Bad\r\nContent-Length: 39\r\n\r\n{"error": {"message": "no", "param": 3}}'[:-1]
    pieces: list[bytes] = []
    async with server(refused + b"}") as (client, _):
        response = await client.post("/v1/x", b"{}", pieces.append)
    assert pieces == []
    assert response.status == 400


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"SSH-2.0\r\n", "answer is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "connection closed before the end of the answer"),
        (b"", "connection closed before the end of the answer"),
    ],
)
async def test_half_answers_are_errors(answer: bytes, kind: str) -> None:
    async with server(answer, close=True) as (client, _):
        with pytest.raises(TransportError) as error:
            await client.get("/v1/models")
        assert error.value.kind == kind


async def test_what_goes_wrong_in_a_reader_reaches_who_waits() -> None:
    def refuse(data: bytes) -> None:
        raise RuntimeError("no more")

    async with server(OK) as (client, _):
        with pytest.raises(RuntimeError, match="no more"):
            await client.post("/v1/x", b"{}", refuse)


async def test_a_unix_socket(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        writer.close()

    path = tmp_path / "door"
    async with await asyncio.start_unix_server(serve, path):
        assert (await HttpClient(parse_url(f"http+unix://{path}")).get("/v1/models")).status == 200
    with pytest.raises(TransportError, match="connect"):
        await HttpClient(parse_url(f"http+unix://{path}x")).get("/v1/models")


@pytest.mark.parametrize(
    ("url", "address", "shown"),
    [
        ("http://host", Address("host", 80, False), "http://host"),
        ("https://host/v1", Address("host", 443, True), "https://host"),
        ("http://[::1]:8000/", Address("::1", 8000, False), "http://[::1]:8000"),
        ("https://host:80/a/b/v1/", Address("host", 80, True, "/a/b"), "https://host:80/a/b"),
    ],
)
def test_urls(url: str, address: Address, shown: str) -> None:
    assert (parse_url(url), str(address)) == (address, shown)


@pytest.mark.parametrize(
    "url", ["", "host:8000", "ftp://x", "http://", "http://x:port", "http://x:99999", "http://x/?a", "http://x/\r\ny"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(InputError, match="--url must be like"):
        parse_url(url)


def test_a_key_that_could_be_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "")
    assert api_key(None) is None
    assert api_key("sk-1") == "sk-1"
    for key in ("a b", "a\nb", "\u00e9"):
        with pytest.raises(InputError, match="printable ASCII"):
            api_key(key)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of 127.0.0.1 that has signed itself; its key is in the same file."""
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=other"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", str(path.with_suffix(".cert"))]
    subprocess.run([*command, *names], check=True, capture_output=True)
    path.write_text(path.read_text() + path.with_suffix(".cert").read_text())
    return path


@pytest.mark.parametrize(
    ("url", "with_tls", "trusted", "words"),
    [
        ("https://127.0.0.1", True, True, None),
        ("https://127.0.0.1", True, False, "not trusted: self-signed certificate); SSL_CERT_FILE can name a file"),
        ("https://localhost", True, True, "not valid for 'localhost'.); the URL must have a name that is in it"),
        ("https://127.0.0.1", False, False, "WRONG_VERSION_NUMBER); does it serve plain HTTP?"),
        ("http://127.0.0.1", True, False, "With it the URL begins with https://"),
        ("http://127.0.0.1", False, False, None),
    ],
)
async def test_what_is_wrong_about_tls_is_said(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, url: str, with_tls: bool, trusted: bool, words: str | None
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)  # whatever it is
        writer.write(OK)
        writer.close()

    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = None
    if with_tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as running:
        client = HttpClient(parse_url(f"{url}:{running.sockets[0].getsockname()[1]}"))
        if words is None:
            assert (await client.get("/v1/models")).json() == {}
        else:
            with pytest.raises(TransportError) as caught:
                await client.get("/v1/models")
            assert words in str(unreachable(caught.value, client.address))
        client.close()
