"""`batch`: every line of the input gets one result, whatever happens in between."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.launcher.__main__ import run as run_command
from paceline.launcher.clients import batch as batch_module

Batch = Callable[..., tuple[int, str]]


def line(custom_id: Any, url: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    body = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields}


class Files:
    def __init__(self, folder: Path) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, *lines: Any) -> None:
        self.input.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.output.read_text().splitlines()]

    def ids(self) -> list[str]:
        return sorted(each["custom_id"] for each in self.results())


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def batch(stub: Any, files: Files, capsys: pytest.CaptureFixture[str]) -> Batch:
    """batch(*arguments): exit status and what was printed."""

    def run(*arguments: str) -> tuple[int, str]:
        try:
            status = run_command(["batch", str(files.input), str(files.output), "--url", stub.url, *arguments])
        except SystemExit as end:
            status = int(str(end.code))
        output = capsys.readouterr()
        assert output.out == ""
        return status, output.err

    return run


def test_results_are_in_openais_format(stub: Any, files: Files, batch: Batch) -> None:
    chat = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}
    files.write(line("a"), "", line("b", "/v1/chat/completions", body=chat))
    assert batch() == (0, f"paceline: 2 lines have their results in {files.output}, 0 of them failed\n")
    first, second = sorted(files.results(), key=lambda each: each["custom_id"])
    assert first.keys() == {"id", "custom_id", "response", "error"}
    assert first["error"] is None
    assert first["response"] == {"status_code": 200, "request_id": "req-7", "body": stub.script(line("a")["body"])}
    assert second["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert stub.bodies[0] == line("a")["body"]


def test_bad_lines_are_results_too_and_the_others_run(stub: Any, files: Files, batch: Batch) -> None:
    stub.refused = {"foo"}
    bad = [
        ("no JSON", "line 1: it is no JSON"),
        ("[]", "line 2: it must be a JSON object"),
        (line(7), "line 3: custom_id must be a text"),
        (line("get", method="GET"), "line 4: method must be 'POST'"),
        (line("url", url="http://x/v1/completions"), "line 5: url must be a path"),
        (line("dots", url="/v1/../metrics"), "line 6: url must be a path"),
        (line("body", body=[]), "line 7: body must be a JSON object"),
        (line("stream", body={"stream": True}), "line 8: body.stream must be false"),
        (line("more", metadata={}), "line 9: unknown field 'metadata'"),
    ]
    refused = line("refused", body={"foo": 1})
    files.write(*(each for each, _ in bad), refused, line("path", "/v1/embeddings"), line("good"))
    status, output = batch()
    assert status == 1
    assert "12 lines have their results" in output
    assert "11 of them failed" in output
    results = files.results()
    errors = {each["error"]["line"]: each for each in results if each["error"] is not None}
    for number, (sent, words) in enumerate(bad, 1):
        assert errors[number]["error"]["message"].startswith(words)
        assert errors[number]["response"] is None
        assert errors[number]["custom_id"] == (sent["custom_id"] if isinstance(sent, dict) and number > 3 else None)
    answered = {each["custom_id"]: each["response"] for each in results if each["error"] is None}
    assert {name: each["status_code"] for name, each in answered.items()} == {"refused": 400, "path": 404, "good": 200}
    assert answered["refused"]["body"]["error"]["param"] == "foo"
    before = files.output.read_text()
    assert batch()[0] == 1
    assert files.output.read_text() == before


def test_ids_that_are_used_twice_are_refused_before_anything_runs(stub: Any, files: Files, batch: Batch) -> None:
    files.write(line("a"), line("b"), "", line("a"), line("b"), line("a"))
    assert batch() == (
        2,
        f"paceline: {files.input}: each custom_id may be used once: "
        "'a' on lines 1 and 4, 'b' on lines 2 and 5, 'a' on lines 1 and 6\n",
    )
    assert (stub.bodies, files.output.exists()) == ([], False)


def test_what_is_answered_is_not_asked_again(stub: Any, files: Files, batch: Batch) -> None:
    files.write(line("a"), line("b"), line("c"))
    batch()
    whole = files.output.read_bytes()
    first, second, third = whole.splitlines(keepends=True)
    stub.bodies.clear()
    for left, runs in ((first + second + third[:-1], 0), (first + second + third[:40], 1), (first, 2), (first[:9], 3)):
        files.output.write_bytes(left)
        assert batch()[0] == 0
        assert files.ids() == ["a", "b", "c"]
        assert len(stub.bodies) == runs
        stub.bodies.clear()


def test_a_killed_run_is_gone_on_with(stub: Any, files: Files, batch: Batch) -> None:
    stub.may_answer = lambda: len(stub.bodies) < 60
    names = [f"id-{number}" for number in range(200)]
    files.write(*map(line, names))
    command = [sys.executable, "-m", "paceline.launcher", "batch", str(files.input), str(files.output)]
    process = subprocess.Popen([*command, "--url", stub.url, "--concurrency", "4"], stderr=subprocess.DEVNULL)
    while len(stub.bodies) < 60:
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    half = len(files.results())
    assert 0 < half < 200
    stub.may_answer = lambda: True
    while stub.running:
        time.sleep(0.005)
    stub.most_running = 0
    stub.may_answer = lambda: stub.most_running >= 16
    assert batch("--concurrency", "16")[0] == 0
    assert files.ids() == sorted(names)
    assert stub.most_running == 16


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_was_answered(stub: Any, files: Files, number: signal.Signals, status: int) -> None:
    stub.may_answer = lambda: len(stub.bodies) < 20
    files.write(*map(line, map(str, range(500))))
    command = [sys.executable, "-m", "paceline.launcher", "batch", str(files.input), str(files.output)]
    process = subprocess.Popen([*command, "--url", stub.url, "--concurrency", "4"], stderr=subprocess.PIPE, text=True)
    while len(stub.bodies) < 20:
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    stub.may_answer = lambda: True
    assert process.returncode == status
    assert errors == f"paceline: what was answered is kept in {files.output}; the same command goes on from there\n"
    assert len(set(files.ids())) == len(files.results()) > 0


def test_a_server_without_room_is_asked_again(
    stub: Any, files: Files, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "_MOST_WAIT_SECONDS", 0.001)
    plain = stub.script
    stub.script = lambda body: (429, {"error": {"message": "full"}}) if len(stub.bodies) < 3 else plain(body)
    files.write(line("a"))
    assert batch()[0] == 0
    assert len(stub.bodies) == 3
    stub.script = lambda body: (429, {"error": {"message": "full"}})
    files.write(line("b"))
    assert batch()[0] == 1
    assert files.results()[-1]["response"]["status_code"] == 429


def test_a_server_that_is_gone_ends_the_run_and_leaves_no_results(
    stub: Any, files: Files, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "_MOST_WAIT_SECONDS", 0.001)
    files.write(line("a"), line("b"))
    assert batch("--url", "http://127.0.0.1:1") == (
        1,
        "paceline: http://127.0.0.1:1 cannot be reached (connection refused); is a server running there?\n",
    )
    stub.key = "right"
    status, output = batch("--api-key", "wrong")
    assert (status, output.count("\n")) == (2, 1)
    assert "wants an API key" in output
    assert not files.output.exists()
    files.output.touch()
    assert batch("--api-key", "wrong")[0] == 2
    assert files.output.read_bytes() == b""


def test_a_server_without_tls_is_not_asked_again(
    stub: Any, files: Files, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "_MOST_TRIES", 10**9)
    files.write(line("a"))
    status, output = batch("--url", stub.url.replace("http://", "https://"))
    assert (status, output.count("\n")) == (1, 1)
    assert "does it serve plain HTTP?" in output


def test_a_file_that_is_no_output_is_left_alone(files: Files, batch: Batch) -> None:
    files.write(line("a"))
    for content, words in (("precious notes\n", "line 1 is no result"), ("precious", "line 1 is no result")):
        files.output.write_text(content)
        status, output = batch()
        assert (status, output.count("\n")) == (2, 1)
        assert words in output
        assert files.output.read_text() == content
    with files.output.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "is being written by another run" in batch()[1]
    files.output.unlink()
    files.output.symlink_to(files.input)
    assert "is the input" in batch()[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "x"), "--model is for an own engine"),
        (("--tp", "2"), "--tp is for an own engine"),
        (("--max-model-len", "9"), "--max-model-len is for an own engine"),
        (("--served-model-name", "x"), "--served-model-name is for an own engine"),
        (("--concurrency", "0"), "--concurrency must be"),
        (("--url", "nowhere"), "--url must be like"),
    ],
)
def test_options_that_make_no_sense(files: Files, batch: Batch, arguments: tuple[str, ...], words: str) -> None:
    files.write(line("a"))
    status, output = batch(*arguments)
    assert (status, output.count("\n")) == (2, 1)
    assert words in output


def test_an_own_engine_over_two_ranks(tiny: Any, files: Files) -> None:
    body = {"model": "own", "prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    files.write(*(line(str(number), body=body) for number in range(6)), line("bad", body=body | {"n": 0}))
    command = [sys.executable, "-m", "paceline.launcher.start", "batch", str(files.input), str(files.output)]
    own = ["--model", str(tiny("llama").folder), "--served-model-name", "own", "--device", "cpu", "--tp", "2"]
    result = subprocess.run(
        [*command, *own], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 1, result.stderr
    assert result.stderr.splitlines()[-1].endswith(
        "7 lines have their results in " + f"{files.output}, 1 of them failed"
    )
    answers = {each["custom_id"]: each["response"] for each in files.results()}
    assert answers.pop("bad")["body"]["error"]["param"] == "n"
    assert {each["body"]["usage"]["completion_tokens"] for each in answers.values()} == {5}
    assert len(answers) == 6


def test_a_terminated_run_leaves_nothing_behind(tiny: Any, files: Files) -> None:
    body = {"model": "own", "prompt": [5, 6, 7], "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    files.write(*(line(str(number), body=body) for number in range(2000)))
    command = [sys.executable, "-m", "paceline.launcher.start", "batch", str(files.input), str(files.output)]
    own = ["--model", str(tiny("llama").folder), "--served-model-name", "own", "--device", "cpu", "--concurrency", "4"]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path may have no more than 107 characters
        process = subprocess.Popen(
            [*command, *own],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder},
            stderr=subprocess.PIPE,
            text=True,
        )
        while not (files.output.exists() and files.results()):
            assert process.poll() is None
            time.sleep(0.01)
        assert list(Path(folder).glob("paceline-*"))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM, errors
        assert "Traceback" not in errors
        assert errors.endswith(f"what was answered is kept in {files.output}; the same command goes on from there\n")
        assert list(Path(folder).glob("paceline-*")) == []


def test_an_own_engine_that_cannot_start_is_one_line(files: Files, tmp_path: Path) -> None:
    files.write(line("a"))
    command = [sys.executable, "-m", "paceline.launcher.start", "batch", str(files.input), str(files.output)]
    result = subprocess.run([*command, "--model", "/nowhere"], capture_output=True, text=True, timeout=240)
    assert result.returncode == 2
    assert result.stderr.startswith("paceline: model '/nowhere' is not a folder")
    assert result.stderr.count("\n") == 1
