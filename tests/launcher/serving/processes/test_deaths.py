"""Processes of a server that are killed: the others end, and clients and whoever started them are told."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest


@pytest.mark.parametrize(
    ("victim", "rank", "tp"),
    [("front_process", None, 1), ("launcher serve", 0, 1), ("front_process", None, 2), ("launcher serve", 1, 2)],
)
def test_a_killed_process_ends_all(serve: Callable[..., Any], victim: str, rank: int | None, tp: int) -> None:
    server = serve(tp=tp).wait_ready()
    os.kill(server.pid_of(victim, rank), signal.SIGKILL)
    status, errors = server.end()
    assert status != 0
    if victim == "front_process":
        assert errors == "paceline: the HTTP process ended unexpectedly (by SIGKILL)"


def answer_to_who_waits(server: Any, kill: Callable[[], None]) -> httpx.Response:
    """What a client is told whose request runs when a process is killed."""
    body = {"prompt": [1, 2, 3], "n": 16, "max_tokens": 500, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=120)
        server.wait_running()
        kill()
        return running.result()


def test_clients_are_told_that_a_rank_died(serve: Callable[..., Any]) -> None:
    server = serve(tp=2).wait_ready()
    victim = server.pid_of("launcher serve", 1)
    answer = answer_to_who_waits(server, lambda: os.kill(victim, signal.SIGKILL))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_failed"
    status, errors = server.end()
    assert status != 0
    assert f"paceline: rank 1 (process {victim}) ended unexpectedly" in errors


def test_clients_are_told_that_rank_0_was_killed_with_its_group(serve: Callable[..., Any]) -> None:
    """So torchrun ends a rank that does not end by itself."""
    server = serve(tp=2).wait_ready()
    group = server.pid_of("launcher serve", 0)
    answer = answer_to_who_waits(server, lambda: os.killpg(group, signal.SIGKILL))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_failed"
    status, errors = server.end()
    assert status == 128 + signal.SIGKILL
    assert "paceline: rank 0 was ended by SIGKILL" in errors


def test_ranks_do_not_outlive_who_started_them(serve: Callable[..., Any]) -> None:
    server = serve(tp=2).wait_ready()
    os.kill(server.process.pid, signal.SIGKILL)
    server.end()
