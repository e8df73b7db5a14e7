"""`chat` at a terminal (a pseudo-terminal here) and over pipes."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "paceline.launcher", "chat"]
CTRL_C, CTRL_D = "\x03", "\x04"


class Session:
    """A `chat` at a terminal of its own."""

    def __init__(self, *arguments: str, cache: Path) -> None:
        self._screen, terminal = pty.openpty()
        # setsid with a controlling terminal, so that Ctrl-C is a signal as it is for a person.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LOGIN, *COMMAND, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "PACELINE_CACHE": str(cache)},
        )
        os.close(terminal)
        self._seen = ""

    def expect(self, words: str) -> str:
        """Read until these words, and return all up to them."""
        deadline = time.monotonic() + 60
        while words not in self._seen:
            assert time.monotonic() < deadline, self._seen
            if select.select([self._screen], [], [], 1)[0]:
                try:
                    self._seen += os.read(self._screen, 4096).decode()
                except OSError as error:  # the other end is closed
                    raise AssertionError(self._seen) from error
        before, _, self._seen = self._seen.partition(words)
        return before

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def wait_asleep(self) -> None:
        """Return once it waits for input: a signal that comes just before is only seen with the next key."""
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)

    def end(self) -> int:
        status = self.process.wait(timeout=240)
        os.close(self._screen)
        return status


_LOGIN = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture
def session(stub: Any, tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """session(*arguments): at its first prompt."""
    sessions: list[Session] = []

    def start(*arguments: str) -> Session:
        made = Session("--url", stub.url, *arguments, cache=tmp_path)
        sessions.append(made)
        made.expect("stub (/help lists commands)")
        made.expect("> ")
        return made

    yield start
    for each in sessions:
        each.process.kill()
        each.process.wait()


@pytest.fixture
def piped(stub: Any) -> Callable[..., tuple[int, str, str]]:
    """piped(text, *arguments): exit status, standard output and standard error."""

    def run(text: str, *arguments: str) -> tuple[int, str, str]:
        result = subprocess.run(
            [*COMMAND, "--url", stub.url, *arguments], input=text, capture_output=True, text=True, timeout=240
        )
        return result.returncode, result.stdout, result.stderr

    return run


def says(*pieces: str | dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """A script that answers in these pieces."""
    deltas = [{"content": each} if isinstance(each, str) else each for each in pieces]
    usage = {"prompt_tokens": 5, "completion_tokens": len(deltas)}
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    return lambda body: [*events, {"choices": [], "usage": usage}, "[DONE]"]


def test_a_conversation(stub: Any, session: Callable[..., Session], tmp_path: Path) -> None:
    stub.script = says({"reasoning_content": "hm, "}, {"reasoning_content": "hm"}, "Hello", " you.", "\x1b]0;evil\x07")
    chat = session("--system", "Be brief.", "--set", "temperature=0.5")
    chat.type("Hi\n")
    shown = chat.expect(" tok/s")
    assert "\x1b[2mhm, hm\r\n\r\n\x1b[0mHello you.]0;evil" in shown
    assert "5 tokens, first after " in shown
    chat.expect("> ")
    chat.type("/set top_p 0.9\n/set temperature\n/set stop two words\n/set\n")
    chat.expect("top_p 0.9\r\nstop two words\r\n")
    chat.type('"""one\ntwo\n"""\n')
    chat.expect(" tok/s")
    assert stub.bodies[1] == {
        "model": "stub",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello you.\x1b]0;evil\x07"},
            {"role": "user", "content": "one\ntwo"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_p": 0.9,
        "stop": "two words",
    }
    chat.type(f"/save {tmp_path}/said.json\n")
    chat.expect("saved in")
    assert json.loads((tmp_path / "said.json").read_text())[:-1] == stub.bodies[1]["messages"]
    chat.type("/system\nagain\n")
    chat.expect(" tok/s")
    assert stub.bodies[2]["messages"] == [{"role": "user", "content": "again"}]
    chat.type("/nonsense\n")
    chat.expect("'/nonsense' is no command; /help lists them")
    chat.type("/quit\n")
    assert chat.end() == 0
    kept = tmp_path / "chat_history"
    assert "again" in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(stub: Any, session: Callable[..., Session]) -> None:
    stub.script = lambda body: [{"choices": [{"delta": {"content": f"w{number} "}}]} for number in range(100_000)]
    stub.pause = 0.005
    chat = session()
    chat.type("Go on\n")
    chat.expect("w3 ")
    chat.type(CTRL_C)
    chat.expect("stopped")
    chat.expect("> ")
    while stub.running:  # the connection is dropped, and the server sees it
        time.sleep(0.01)
    stub.script = says("Yes.")
    chat.type("never mind")
    chat.expect("never mind")
    chat.wait_asleep()
    chat.type(CTRL_C)
    chat.expect("> ")
    chat.type("And now?\n")
    chat.expect("Yes.")
    chat.expect("> ")
    said = stub.bodies[-1]["messages"]
    assert [turn["role"] for turn in said] == ["user", "assistant", "user"]
    assert said[1]["content"].startswith("w0 w1 w2 w3 ")
    chat.type(CTRL_D)
    assert chat.end() == 0


def test_errors_are_words_and_the_conversation_goes_on(stub: Any, session: Callable[..., Session]) -> None:
    stub.script = lambda body: (400, {"error": {"message": "temperature must be cold", "param": "temperature"}})
    chat = session("--set", "temperature=9")
    chat.type("Hi\n")
    chat.expect("temperature must be cold (/set temperature takes it back)")
    stub.script = lambda body: [{"choices": [{"delta": {"content": "He"}}]}, {"error": {"message": "it broke"}}]
    chat.type("Hi\n")
    chat.expect("it broke")
    chat.type("/set messages 3\n")
    chat.expect("messages cannot be set")
    assert len(stub.bodies[1]["messages"]) == 1
    chat.type("/quit\n")
    assert chat.end() == 0


def test_a_pipe_gets_plain_answers_a_line_a_turn(stub: Any, piped: Callable[..., tuple[int, str, str]]) -> None:
    stub.script = says({"reasoning": "hm"}, "Hello", " you.")
    text = 'Hi\n\n/set seed 3\n"""a\nb"""\n'
    assert piped(text) == (0, "Hello you.\nHello you.\n", "")
    assert [body["messages"][-1]["content"] for body in stub.bodies] == ["Hi", "a\nb"]
    assert stub.bodies[1]["seed"] == 3
    assert piped("Hi\nyou\n", "--one-turn") == (0, "Hello you.\n", "")
    assert stub.bodies[2]["messages"] == [{"role": "user", "content": "Hi\nyou"}]


def test_a_pipe_ends_with_the_first_error(stub: Any, piped: Callable[..., tuple[int, str, str]]) -> None:
    stub.script = lambda body: (500, {"error": {"message": "it broke"}})
    assert piped("Hi\nHi\n") == (1, "", "paceline: it broke\n")
    assert len(stub.bodies) == 1
    assert piped("/nonsense\n") == (2, "", "paceline: '/nonsense' is no command; /help lists them\n")
    assert piped("Hi\n", "other") == (2, "", f"paceline: {stub.url} serves no model 'other'; it has stub\n")
    assert piped("Hi\n", "--url", "http://127.0.0.1:1")[::2] == (
        1,
        "paceline: http://127.0.0.1:1 cannot be reached (connection refused); is a server running there?\n",
    )
    assert piped("Hi\n", "--device", "cpu")[2].startswith("paceline: --device is for an own engine")


def test_an_own_engine(default_model: Path) -> None:
    own = [str(default_model), "--device", "cpu", "--set", "temperature=0", "--set", "max_tokens=16"]
    result = subprocess.run(
        [sys.executable, "-m", "paceline.launcher.start", "chat", *own],
        input="What is the capital of France?\n/set n 2\n",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.stdout == "The capital of France is Paris.\n"
    assert result.stderr.splitlines()[1:] == ["paceline: n cannot be set"]
    assert result.returncode == 2
