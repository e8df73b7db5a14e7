"""The files of the page, and by which names the server may be addressed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.launcher.serving.hosts import hosts_to_allow
from paceline.launcher.serving.page_files import FOLDER

pytestmark = pytest.mark.anyio

LOOPBACK = ("127.0.0.1", "127.9.9.9:80", "localhost", "LocalHost:8000", "localhost.", "app.localhost", "[::1]:8000")
STRANGERS = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "10.0.0.1",
    "",
    "[::2]",
)


async def test_the_page_is_open_and_needs_nothing_from_elsewhere(serve: Any) -> None:
    async with serve(api_keys=("sk-right",)).http() as client:
        page = await client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        links = re.findall(r'(?:href|src)="([^"]*)"', page.text)
        assert set(links) <= {f"page/{file.name}" for file in FOLDER.iterdir()}
        for file in FOLDER.iterdir():
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            answer = await client.get(path)
            assert (answer.status_code, answer.content) == (200, file.read_bytes())
            assert not re.search(
                rb"<script(?! type=\"module\" src=)|\son\w+=\"|style=\"|https?://(?!www\.w3\.org/2000/svg)\w",
                answer.content,
            )
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self'; ")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        for path in ("/page/", "/page/none.js", "/page/../gate.py", "/page/%2e%2e/gate.py", "/index.html"):
            assert (await client.get(f"http://server{path}")).status_code == 401


async def test_a_file_that_has_not_changed_is_not_sent_again(served: Any) -> None:
    async with served.http() as client:
        first = await client.get("/page/main.js")
        tag = first.headers["etag"]
        for known, status in ((tag, 304), (f'W/{tag}, "x"', 304), ('"x"', 200), ("*", 304)):
            answer = await client.get("/page/main.js", headers={"if-none-match": known})
            assert (answer.status_code, answer.headers["etag"]) == (status, tag)
            assert answer.content == (b"" if status == 304 else first.content)
        head = await client.head("/")
        assert (head.status_code, head.content) == (200, b"")


async def test_strangers_names_for_the_server_are_refused(serve: Any) -> None:
    served = serve(allowed_hosts=hosts_to_allow("127.0.0.1", (), has_keys=False))
    async with served.http() as client:
        for path in ("/", "/v1/models", "/health", "/none"):
            for host in STRANGERS:
                answer = await client.get(path, headers={"host": host})
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_refused"), host
        for host in LOOPBACK:
            assert (await client.get("/v1/models", headers={"host": host})).status_code == 200, host


async def test_a_host_that_was_allowed_is_let_in(serve: Any) -> None:
    served = serve(allowed_hosts=hosts_to_allow("127.0.0.1", ("Llm.Example", "[fd00::1]:80"), has_keys=False))
    async with served.http() as client:
        for host, status in (("llm.example:443", 200), ("[FD00::1]", 200), ("localhost", 200), ("example", 403)):
            assert (await client.get("/v1/models", headers={"host": host})).status_code == status, host


@pytest.mark.parametrize(
    ("bound", "given", "has_keys", "expected"),
    [
        ("127.0.0.1", (), False, ("localhost", "127.0.0.1")),
        ("::1", (), False, ("localhost", "::1")),
        ("localhost", (), False, ("localhost", "localhost")),
        ("127.0.0.1", (), True, ()),  # a page that has the key is no stranger's
        ("0.0.0.0", (), False, ()),  # which names lead here is not known
        (None, (), False, ()),  # no browser reaches a Unix socket
        ("0.0.0.0", ("a.example",), True, ("localhost", "0.0.0.0", "a.example")),
    ],
)
def test_which_hosts_are_checked(bound: str | None, given: tuple[str, ...], has_keys: bool, expected: Any) -> None:
    assert hosts_to_allow(bound, given, has_keys=has_keys) == expected
