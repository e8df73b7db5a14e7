"""`serve` as a person runs it: real processes, real connections, and nothing left when it ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

PROMPT = [1, 2, 3]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_signal_lets_running_requests_finish(serve: Callable[..., Any], tp: int) -> None:
    server = serve("--served-model-name", "tiny", "--drain-timeout", "300", tp=tp).wait_ready()
    assert server.get("/health").status_code == 200
    assert server.get("/ready").status_code == 200
    assert server.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert server.complete(model="tiny")["usage"]["completion_tokens"] == 8
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(server.complete, max_tokens=400, ignore_eos=True, n=8)
        server.wait_running()
        server.process.send_signal(signal.SIGTERM)
        assert running.result()["usage"]["completion_tokens"] == 8 * 400
    assert server.end() == (0, "")
    with pytest.raises(httpx.ConnectError):
        server.get("/health")


def test_b60_while_it_drains_streams_go_on_and_who_comes_is_told_to_come_back(serve: Callable[..., Any]) -> None:
    """20 run and 20 wait, on two ranks; there is time for all."""
    server = serve("--max-num-seqs", "20", "--drain-timeout", "300", tp=2).wait_ready()
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        streams = [pool.submit(server.stream, max_tokens=300) for _ in range(40)]
        while server.get("/v1/load").json()["accepted"] < 40:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        server.wait_draining()
        for answer in (
            httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT}, timeout=60),
            server.get("/ready"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            assert int(answer.headers["retry-after"]) >= 1
        assert server.get("/health").status_code == 200
        for status, events in (each.result() for each in streams):
            assert status == 200
            assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.end() == (0, "")


@pytest.mark.parametrize(("seconds", "again", "tp"), [(0, False, 2), (1, False, 1), (60, True, 1), (60, True, 2)])
def test_b60_streams_that_are_cut_off_are_told(serve: Callable[..., Any], seconds: int, again: bool, tp: int) -> None:
    """At once with a drain timeout of 0, when it has passed, and by a second signal."""
    # Two at a time, so that the 16 answers of a stream take 4,000 steps: longer than any wait here.
    server = serve("--drain-timeout", str(seconds), "--max-num-seqs", "2", tp=tp).wait_ready()
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        streams = [pool.submit(server.stream, max_tokens=500, n=16) for _ in range(20)]
        while server.get("/v1/load").json()["accepted"] < 320:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        if again:
            server.wait_draining()
            time.sleep(1)  # sooner it would count as an echo
            assert not any(each.done() for each in streams)
            server.process.send_signal(signal.SIGTERM)
        for status, events in (each.result() for each in streams):
            # Those that had no token yet are told by the status.
            assert status in (200, 503)
            assert events[-1]["error"]["code"] == "shutting_down"
    assert server.end() == (128 + signal.SIGTERM if again else 0, "")
    (stopped,) = (line for line in server.log if line["event"] == "stopped")
    assert 0 < stopped["cut_answers"] <= 320


def test_b58_two_thousand_clients_at_once_and_few_places(serve: Callable[..., Any]) -> None:
    """Where a process may open 1,024 files unless it asks for more: nobody's connection is reset, and all are told.

    Nobody reads the log meanwhile, whose two thousand lines are more than its pipe holds.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # this process holds the clients' ends
    server = serve("--max-queue", "10")
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (1024, most))
    port = int(server.wait_ready().url.rsplit(":", 1)[1])
    body = json.dumps({"prompt": PROMPT, "max_tokens": 500, "n": 5, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"

    async def client(everyone: asyncio.Barrier) -> tuple[int, bool]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await everyone.wait()
        writer.write(f"{head}\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        return int(answer.split()[1]), b"\r\nretry-after: " in answer

    async def crowd() -> list[tuple[int, bool]]:
        everyone = asyncio.Barrier(2000)
        return await asyncio.gather(*(client(everyone) for _ in range(2000)))

    answers = asyncio.run(crowd())
    statuses = [status for status, _ in answers]
    assert set(statuses) == {200, 429}
    assert all(retry for status, retry in answers if status == 429)
    assert 2 <= len(answers) - statuses.count(429) < 200
    load = server.get("/v1/load").json()
    assert (load["accepted"], load["cache_blocks"]["used"]) == (0, 0)
    assert server.complete()["usage"]["completion_tokens"] == 8
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == (0, "")
    assert [line["event"] for line in server.log].count("request") == 2001


def test_a_server_that_is_ended_while_it_loads_leaves_nothing_behind(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        server = serve()
        while not list(Path(folder).glob("paceline-*")):
            assert server.process.poll() is None
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[0] == 128 + signal.SIGTERM
        assert list(Path(folder).glob("paceline-*")) == []


SIGNAL_AT_ITS_FOLDER = """
import os, signal, sys, tempfile

make = tempfile.mkdtemp

def mkdtemp(*arguments, **options):
    folder = make(*arguments, **options)
    if options.get("prefix") == "paceline-sockets-" and "serve" in sys.orig_argv:
        os.kill(os.getpid(), signal.SIGTERM)
    return folder

tempfile.mkdtemp = mkdtemp
"""


def test_a_signal_in_the_instant_in_which_its_files_are_made_leaves_none(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        (tmp_path / "sitecustomize.py").write_text(SIGNAL_AT_ITS_FOLDER)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv("TMPDIR", folder)
        socket_path = Path(folder, "server")
        assert serve("--uds", str(socket_path)).end()[0] == 128 + signal.SIGTERM
        assert list(Path(folder).glob("paceline-*")) == []
        assert not socket_path.exists()


SIGNAL_WITHIN_TORCH = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy" and "serve" in sys.orig_argv:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder())
"""


def test_a_signal_while_torch_is_imported_ends_the_server(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's native code imports numpy and drops what that raises."""
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_WITHIN_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert serve().end()[0] == 128 + signal.SIGTERM


def test_ctrl_c_ends_an_idle_server(serve: Callable[..., Any]) -> None:
    server = serve().wait_ready()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == (0, "")
    assert (server.log[-1]["event"], server.log[-1]["cut_answers"]) == ("stopped", 0)


def test_requests_that_take_too_long_are_cut_off(serve: Callable[..., Any]) -> None:
    server = serve("--drain-timeout", "1").wait_ready()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(server.ask_too_much)
        server.wait_running()
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0
        assert server.log[-1]["cut_answers"] == 64 * 16
        assert running.result() is None


def test_a_second_signal_does_not_wait(serve: Callable[..., Any]) -> None:
    server = serve("--drain-timeout", "60").wait_ready()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(server.ask_too_much)
        server.wait_running()
        server.process.send_signal(signal.SIGINT)
        server.wait_draining()
        time.sleep(1)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.end()[0] == 128 + signal.SIGINT
        assert running.result() is None


def test_a_port_in_use_is_one_line(serve: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, errors = serve(port=str(port), tp=2).end()
    words = f"cannot listen on 127.0.0.1 port {port} (Address already in use); choose others with --host and --port"
    assert (status, errors) == (2, f"paceline: {words}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--api-key-file", "/nowhere"), "--api-key-file /nowhere cannot be read"),
        (("--api-key-file", "/dev/null"), "holds no key"),
        (("--ssl-certfile", "/dev/null"), "--ssl-certfile /dev/null cannot be used (no PEM that OpenSSL can read)"),
        (("--ssl-keyfile", "/dev/null"), "needs --ssl-certfile"),
        (("--host", "no such host"), "cannot listen on no such host"),
        (("--port", "65536"), "--port must be from 0 to 65535"),
        (("--drain-timeout", "nan"), "--drain-timeout must be"),
        (("--max-queue", "0"), "paceline: --max-queue must be"),
        (("--request-timeout", "0"), "paceline: --request-timeout must be"),
        (("--otlp-endpoint", "collector:4318"), "paceline: --otlp-endpoint must be a URL"),
        (("--allowed-host", ""), "paceline: --allowed-host may not be an empty text"),
        (("--cors-origin", "page.example"), "paceline: --cors-origin must be like https://host"),
        (("--uds", "/dev/null"), "cannot listen on --uds /dev/null"),
        (("--num-blocks", "0"), "paceline: --num-blocks must be"),
    ],
)
def test_what_cannot_be_done_is_one_line(serve: Callable[..., Any], arguments: tuple[str, ...], words: str) -> None:
    status, errors = serve(*arguments).end()
    assert status == 2
    assert words in errors
    assert "\n" not in errors


@pytest.mark.parametrize("tp", [1, 2])
def test_a_bad_model_is_one_line(serve: Callable[..., Any], tp: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mystery"}')
    status, errors = serve(model=str(tmp_path), tp=tp).end()
    assert status == 2
    assert errors.startswith("paceline: ")
    assert "\n" not in errors


def test_a_unix_socket_and_keys(serve: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n")
    path = tmp_path / "door"
    for _ in range(2):  # the second finds the place of the first
        server = serve("--uds", str(path), "--api-key-file", str(keys)).wait_ready()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://door", timeout=60) as client:
            body = {"prompt": PROMPT, "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 401
            answer = client.post("/v1/completions", json=body, headers={"authorization": "Bearer second"})
            assert answer.json()["usage"]["completion_tokens"] == 2
        assert "second" not in "".join(server.processes().values())
        server.kill()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    return certificate, key


def test_a_certificate_without_its_key_is_one_line(serve: Callable[..., Any], tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path)
    status, errors = serve("--ssl-certfile", str(certificate)).end()
    words = f"--ssl-certfile {certificate} holds no private key; give --ssl-keyfile"
    assert (status, errors) == (2, f"paceline: {words}")


def test_https(serve: Callable[..., Any], tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    server = serve("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)).wait_ready()
    assert server.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=str(certificate))
    body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, verify=trusting, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 2


def numbers(server: Any) -> dict[str, float]:
    """What /metrics says, by name and labels as they stand there."""
    text = server.get("/metrics").text
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}


def at_rest(got: dict[str, float]) -> bool:
    """Whether every request has ended everywhere, and every rank has come as far as rank 0."""
    left = [
        got["paceline_accepted_answers"],
        got["paceline_num_requests_running"],
        got["paceline_num_requests_waiting"],
    ]
    done, behind = (got[f'paceline_rank_steps_total{{rank="{rank}"}}'] for rank in range(2))
    gone = got['paceline_request_errors_total{code="client_gone"}']
    return left == [0, 0, 0] and done == behind and gone == 1


def test_operators_see_what_clients_got(serve: Callable[..., Any]) -> None:
    """Field report B64, two ranks, a cache too small for all: metrics and log agree with what the clients counted."""
    server = serve("--num-blocks", "24", "--block-size", "8", "--max-queue", "48", tp=2).wait_ready()
    prefix = list(range(40))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Five prompts of one request run together, however late the other one comes, and are too many already.
        prompts = ([[*prefix, number] for number in range(first, first + 5)] for first in (0, 5))
        running = [pool.submit(server.complete, prompt=each, max_tokens=60, ignore_eos=True) for each in prompts]
        server.wait_running()
        while not all(future.done() for future in running):
            during = numbers(server)
            assert during["paceline_kv_cache_usage_perc"] <= 1
            assert (
                sum(during[f'paceline_kv_cache_blocks{{state="{state}"}}'] for state in ("free", "cached", "used"))
                == 24
            )
            assert all(during[f'paceline_rank_heartbeat_age_seconds{{rank="{rank}"}}'] < 60 for rank in range(2))
        usages = [future.result()["usage"] for future in running]
    endless = {"prompt": PROMPT, "n": 40, "max_tokens": 180, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=endless, timeout=120) as answer:
        next(answer.iter_lines())  # and leave
    for body in ({"prompt": PROMPT, "top_p": 2}, {"prompt": PROMPT, "n": 49}):
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 400
    while not at_rest(got := numbers(server)):
        time.sleep(0.02)
    expected = {
        'paceline_request_success_total{finished_reason="length"}': 10,
        'paceline_request_success_total{finished_reason="abort"}': 40,
        'paceline_request_errors_total{code="client_gone"}': 1,
        'paceline_http_responses_total{path="/v1/completions",status="400"}': 2,
        "paceline_request_generation_tokens_sum": sum(usage["completion_tokens"] for usage in usages),
        "paceline_request_prompt_tokens_sum": sum(usage["prompt_tokens"] for usage in usages),
        'paceline_kv_cache_blocks{state="used"}': 0,
        "paceline_iteration_tokens_total_count": got['paceline_rank_steps_total{rank="0"}'],
        'paceline_step_time_seconds_count{part="wait"}': got['paceline_step_time_seconds_count{part="plan"}'],
    }
    assert {name: got[name] for name in expected} == expected
    assert got["paceline_num_preemptions_total"] > 0
    assert got["paceline_prefix_cache_hits_total"] >= sum(
        usage["prompt_tokens_details"]["cached_tokens"] for usage in usages
    )
    assert got["paceline_generation_tokens_total"] >= got["paceline_request_generation_tokens_sum"]
    for rank in range(2):
        assert got[f'paceline_rank_memory_bytes{{kind="weights",rank="{rank}"}}'] > 100_000
        used = got[f'paceline_rank_device_memory_used_bytes{{rank="{rank}"}}']
        assert 50 << 20 < used < got[f'paceline_rank_device_memory_bytes{{rank="{rank}"}}']
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == (0, "")
    events = [line["event"] for line in server.log]
    assert [event for event in events if event != "request"] == [
        "starting",
        next(event for event in events if event.startswith("loaded")),
        "ready",
        "draining",
        "stopped",
    ]
    lines = [line for line in server.log if line["event"] == "request"]
    assert sorted(line["status"] for line in lines) == [200] * 3 + [400, 400]
    assert [line["error"] for line in lines if line["status"] == 200 and "error" in line] == ["the client left"]
    assert sum(line["completion_tokens"] for line in lines if line["status"] == 200 and "error" not in line) == 600
