"""`bench serve` against a server that says what it is told to."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.launcher.__main__ import run as run_command
from paceline.launcher.bench.load import Load
from paceline.launcher.bench.plan import PlannedRequest
from paceline.launcher.bench.statistics import summarise
from paceline.launcher.clients.http import Response

Bench = Callable[..., tuple[int, str]]


@pytest.fixture
def bench(stub: Any, capsys: pytest.CaptureFixture[str]) -> Bench:
    """bench(*arguments): exit status and all that was printed."""

    def run(*arguments: str) -> tuple[int, str]:
        status = run_command(["bench", "serve", "--url", stub.url, *arguments])
        output = capsys.readouterr()
        return status, output.out + output.err

    return run


def test_tokens_and_shares_are_the_servers(stub: Any, bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    status, output = bench(
        *(
            "--rate",
            "500",
            "--requests",
            "20",
            "--prompt-tokens",
            "30:60",
            "--output-tokens",
            "3:9",
            "--json",
            str(file),
        )
    )
    assert status == 0
    load = stub.bodies[1:]  # the first one asked which fields the server takes
    result = json.loads(file.read_text())
    prompts, outputs = (sum(len(body["prompt"]) for body in load), sum(body["max_tokens"] for body in load))
    assert (result["requests"]["answered"], result["prompt_tokens"], result["output_tokens"]) == (20, prompts, outputs)
    assert result["cached_share"] == round(sum(len(body["prompt"]) // 2 for body in load) / prompts, 6)
    assert result["itl_ms"]["count"] == outputs - 20
    # The server says that half of each prompt was cached; a busy machine has more to say of the client.
    (note,) = [note for note in result["notes"] if not note.startswith("the client ")]
    assert "has this seed run before?" in note
    assert f"{outputs:,} out, {prompts:,} in" in output
    assert {30 <= len(body["prompt"]) <= 60 and body["min_tokens"] == body["max_tokens"] for body in load} == {True}
    sent = [row[1] for row in result["rows"]]
    assert all(sent >= due for due, sent, *_ in result["rows"])
    assert sent == sorted(sent)


def test_the_same_seed_sends_the_same_bodies(stub: Any, bench: Bench) -> None:
    def bodies(*arguments: str) -> list[dict[str, Any]]:
        stub.bodies.clear()
        assert bench("--concurrency", "1", "--requests", "4", "--prompt-tokens", "9", *arguments)[0] == 0
        return list(stub.bodies)

    assert bodies() == bodies() != bodies("--seed", "1")


def test_a_closed_loop_keeps_so_many_running(stub: Any, bench: Bench) -> None:
    stub.may_answer = lambda: len(stub.bodies) <= 3 or stub.most_running >= 3
    status, output = bench("--concurrency", "3", "--requests", "9", "--output-tokens", "4", "--warmup", "2")
    assert status == 0
    assert "9 of 9 sent, 9 answered" in output
    assert stub.most_running == 3
    assert len(stub.bodies) == 1 + 2 + 9


def test_a_chat_message_has_the_templates_tokens_taken_off(stub: Any, bench: Bench) -> None:
    status, output = bench(
        *(
            "--endpoint",
            "chat",
            "--concurrency",
            "2",
            "--requests",
            "3",
            "--prompt-tokens",
            "50",
            "--output-tokens",
            "2",
        )
    )
    assert status == 0
    assert {len(body["messages"][0]["content"].split()) for body in stub.bodies[1:]} == {48}
    assert "6 out, 150 in" in output


def test_a_replay_leaves_out_what_the_model_is_too_short_for(stub: Any, bench: Bench) -> None:
    stub.model["max_model_len"] = 500
    trace = Path(__file__).parent / "traces" / "azure_conv_head.csv"
    status, output = bench("--trace", str(trace), "--scale", "1000")
    assert status == 0
    assert sorted(len(body["prompt"]) for body in stub.bodies[1:]) == [91, 91, 374]
    assert "2 requests are longer than the model's 500 tokens" in output


def test_fields_that_a_server_does_not_take_are_left_out(stub: Any, bench: Bench) -> None:
    stub.refused = {"ignore_eos", "min_tokens", "continuous_usage_stats"}
    status, output = bench("--concurrency", "1", "--requests", "2", "--output-tokens", "5")
    assert status == 0
    assert "the server does not take ignore_eos, min_tokens, continuous_usage_stats, and went without" in output
    assert "10 out," in output
    assert "skip_special_tokens" in stub.bodies[-1]


def test_errors_are_counted_by_their_kind(stub: Any, bench: Bench) -> None:
    plain = stub.script

    def script(body: dict[str, Any]) -> Any:
        number = len(stub.bodies)
        if number == 2:
            return 429, {"error": {"message": "full", "code": "queue_full"}}
        if number == 3:
            return [*plain(body)[:2], {"error": {"message": "gone", "code": "engine_failed"}}, "[DONE]"]
        if number == 4:
            return plain(body)[:2]
        return plain(body)

    stub.script = script
    status, output = bench("--concurrency", "1", "--requests", "5", "--slo", "ttft=60s", "--slo", "itl=60s")
    assert status == 1
    assert output.endswith("paceline: 3 of 5 requests failed, the first of them with: HTTP 429 queue_full\n")
    for line in ("1 failed: HTTP 429 queue_full", "1 failed: error in the stream (engine_failed)"):
        assert line in output
    assert "1 failed: stream ended early" in output
    assert "2 of 5 within ttft 60000 ms, itl 60000 ms" in output


def test_ctrl_c_prints_what_was_measured(stub: Any, tmp_path: Path) -> None:
    stub.pause = 0.01
    command = [sys.executable, "-m", "paceline.launcher", "bench", "serve", "--url", stub.url, "--output-tokens", "4"]
    process = subprocess.Popen([*command, "--rate", "50", "--duration", "600"], stdout=subprocess.PIPE, text=True)
    while len(stub.bodies) < 20:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "note: interrupted" in output
    assert "TTFT ms" in output


def test_a_picture(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    assert bench("--rate", "300", "--requests", "9", "--slo", "ttft=1s", "--plot", str(path))[0] == 0
    drawn = path.read_text()
    assert drawn.startswith("<?xml")
    assert len(drawn) > 10_000


def test_a_client_that_is_held_up_sends_late_and_says_so() -> None:
    class Held:
        """A target whose every request holds the whole process up."""

        path = ""

        def __init__(self) -> None:
            self.client = self

        def fits(self, plan: PlannedRequest) -> bool:
            return True

        def body(self, plan: PlannedRequest) -> bytes:
            return b""

        async def post(self, path: str, body: bytes, on_body: Any) -> Response:
            time.sleep(0.05)
            on_body(b"data: [DONE]\n\n")
            return Response(200)

    load = Load(Held(), request_timeout=60)  # type: ignore[arg-type]
    asyncio.run(load.run_when_due(PlannedRequest(number, number / 1000, 1, 1) for number in range(3)))
    late = summarise(load.records, {}, open_loop=True).late
    assert late.count == 3
    assert late.max is not None
    assert late.max >= 2 * 0.05 - 0.002


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--rate", "1", "--model", "other"), 2, "serves no model 'other'; it has stub"),
        (("--rate", "0"), 2, "--rate must be"),
        (("--rate", "nan"), 2, "--rate must be"),
        (("--scale", "1"), 2, "--scale needs --trace"),
        (
            ("--scale", "1", "--trace", "/nowhere.csv"),
            2,
            "--trace /nowhere.csv cannot be read (No such file or directory)",
        ),
        ((), 2, "one of the arguments --rate --concurrency --scale is required"),
        (("--rate", "1", "--trace", "/dev/null"), 2, "--trace has times of its own"),
        (("--rate", "1", "--slo", "tpot=1ms"), 2, "must be like ttft=500ms"),
        (("--rate", "1", "--prompt-tokens", "9:3"), 2, "must be like 512"),
        (("--rate", "1", "--prompt-tokens", "5000"), 2, "the model takes 4096"),
        (("--rate", "1", "--plot", "x.gif"), 2, "must end in .png"),
        (("--rate", "1", "--json", "/nowhere/x.json"), 2, "there is no folder /nowhere"),
        (("--rate", "1", "--url", "ftp://x"), 2, "--url must be like"),
        (("--rate", "1", "--url", "http://[x"), 2, "--url must be like"),
        (("--rate", "1", "--url", "http://127.0.0.1:1"), 1, "cannot be reached (connection refused)"),
    ],
)
def test_what_cannot_be_done_is_one_line(bench: Bench, arguments: tuple[str, ...], status: int, words: str) -> None:
    code, output = bench(*arguments)
    assert (code, output.count("\n")) == (status, 1), output
    assert words in output


def test_a_trace_without_requests_is_one_line(bench: Bench, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert bench("--scale", "1", "--trace", str(trace)) == (2, f"paceline: --trace {trace} holds no requests\n")


def test_a_wrong_key_is_one_line(stub: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.key = "right"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    code, output = bench("--rate", "1")
    assert (code, output.count("\n")) == (2, 1)
    assert "wants an API key" in output
    assert bench("--concurrency", "1", "--requests", "1", "--api-key", "right")[0] == 0
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    assert bench("--concurrency", "1", "--requests", "1")[0] == 0
