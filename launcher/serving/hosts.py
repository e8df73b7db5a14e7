"""Which names clients may address the server by, so that no stranger's page reaches it through its visitor's browser.

A page of evil.example can have that name resolve to 127.0.0.1 (DNS rebinding): to the browser a server there is then of
the page's own origin, and CORS does not hold. The name still stands in the Host header.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]*)(:\d*)?")


def host_name(header: str) -> str:
    """The host of a Host header or an option: without its port, in lower case, an IPv6 address without brackets."""
    found = _HOST.fullmatch(header.strip())
    return (found[1] if found else header).strip("[]").rstrip(".").lower()


def is_loopback(host: str) -> bool:
    """Whether a host's name always means the same machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def hosts_to_allow(bound: str | None, given: Sequence[str], *, has_keys: bool) -> tuple[str, ...]:
    """The names beside loopback's that requests may use; none is any.

    bound: the address listened on, None for a Unix socket, which no browser reaches. Who has to know a key is no
    browser's stray page, and a server on other addresses cannot know its names: there they are checked if `given`.
    """
    names = tuple(host_name(each) for each in given)
    if names or (bound is not None and is_loopback(host_name(bound)) and not has_keys):
        return ("localhost", *(() if bound is None else (host_name(bound),)), *names)
    return ()
