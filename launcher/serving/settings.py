"""Settings of the server's HTTP side, each spelled once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from paceline.coordinator.checks import check_integer, check_number, check_switch, shown
from paceline.coordinator.errors import InputError
from paceline.coordinator.sampling_params import SamplingParams

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([^\s/?#@:\[\]\\]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
"""As browsers write it, who compare it letter by letter: neither a path nor a slash at the end."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the server meets its clients. Every value is checked on construction; InputError names a bad one."""

    model_names: tuple[str, ...]
    """Names that requests may give the model; the first is the one that answers carry."""
    api_keys: tuple[str, ...] = ()
    """Any one of them opens every route; without keys all routes are open."""
    max_queue: int = 1024
    """Most answers accepted and not yet finished, running and waiting together; more are refused with 429."""
    body_limit: int = 16 * 2**20
    """Most bytes of a request's body; more are refused with 413 before anything is parsed."""
    request_timeout: float | None = None
    """Seconds after which a request is ended with an error, its waiting time included; None is no limit."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the server from a browser, or ("*",) for all; none unless given."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector that takes OTLP over HTTP, for a trace of each request; None for no traces."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that requests may be addressed to beside this machine's own; without any, they may be to all."""
    log_prompts: bool = False
    """Whether the log lines of requests hold their prompts."""
    tool_parser: str | None = None
    """How the model writes calls of tools, a name of TOOL_PARSERS; None finds it out from the chat template."""
    reasoning_parser: str | None = None
    """How the model writes its reasoning, a name of REASONING_PARSERS; None finds it out."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that hold where a request says nothing, in the place of the class's own."""

    def __post_init__(self) -> None:
        for name in ("model_names", "api_keys", "cors_origins", "allowed_hosts"):
            texts = getattr(self, name)
            # The values themselves are not shown: keys are among them.
            if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
                raise InputError(f"{name} must be a tuple of texts")
            if not all(texts):
                raise InputError(f"{name} may not be an empty text")
        if not self.model_names:
            raise InputError(f"model_names must hold at least one name, got {shown(self.model_names)}")
        check_integer("max_queue", self.max_queue, 1)
        check_integer("body_limit", self.body_limit, 1)
        if self.request_timeout is not None:
            check_number("request_timeout", self.request_timeout, 0, 10**9, above_low=True)
        if self.otlp_endpoint is not None:
            _check_url("otlp_endpoint", self.otlp_endpoint)
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InputError(f"cors_origins must be like https://host, http://host:port or *, got {shown(origin)}")
        check_switch("log_prompts", self.log_prompts)
        SamplingParams(**self.sampling_defaults)


def _check_url(name: str, url: object) -> None:
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        is_good = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_good = False
    if not is_good:
        raise InputError(f"{name} must be a URL such as http://127.0.0.1:4318, got {shown(url)}")
