"""The `chat` command: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.coordinator.errors import EngineError, InputError
from paceline.launcher.clients.options import add_server_options, backend
from paceline.launcher.clients.terminal import QUOTES, Terminal, history
from paceline.launcher.default_model import MODEL_NAME

if TYPE_CHECKING:
    from paceline.launcher.clients.conversation import Conversation
    from paceline.launcher.clients.local_server import LocalServer

HELP = f"""\
{QUOTES}                begin a message of several lines; another {QUOTES} ends it
/reset             begin anew
/system TEXT       begin anew with this system prompt; without a text, with none
/set               show what is sent with each message
/set NAME VALUE    send it with each message: temperature 0.2, max_tokens 100, seed 7, …
/set NAME          do not send it any more
/save FILE         write the conversation as JSON
/help              this
/quit              leave, as Ctrl-D does; Ctrl-C stops an answer"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the program's parser."""
    parser = commands.add_parser("chat", help="talk with a model in the terminal")
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"folder or Hugging Face id (default: {MODEL_NAME}); with --url, what the server calls it",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of each request, such as temperature=0.2; repeatable",
    )
    parser.add_argument(
        "--one-turn", action="store_true", help="the whole standard input is one message (otherwise each line is one)"
    )
    add_server_options(parser, model_option=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Talk until the input ends.

    Raises InputError or EngineError where there is nobody to talk to and, off a terminal, where an answer fails.
    """
    from paceline.launcher.clients.conversation import Conversation
    from paceline.launcher.clients.http import HttpClient
    from paceline.launcher.clients.server import choose_model

    terminal = Terminal(sys.stdin, sys.stdout)
    with backend(arguments) as target, asyncio.Runner() as runner, contextlib.ExitStack() as stack:
        client = HttpClient(target.address, target.key)
        name = None if target.local is not None else arguments.model
        model = str(runner.run(choose_model(client, name))["id"])
        conversation = Conversation(client, model, arguments.system)
        for setting in arguments.set:
            conversation.set(setting)
        if terminal.interactive and not arguments.one_turn:
            stack.enter_context(history())
            terminal.tell(f"{model} (/help lists commands)")
        Chat(conversation, terminal, runner, target.local).run(one_turn=arguments.one_turn)
        client.close()


class Chat:
    """Turns of a person and a model."""

    def __init__(
        self, conversation: Conversation, terminal: Terminal, runner: asyncio.Runner, local: LocalServer | None
    ) -> None:
        self._conversation = conversation
        self._terminal = terminal
        self._runner = runner
        self._local = local

    def run(self, *, one_turn: bool) -> None:
        """Until the input ends or /quit.

        Raises EngineError where the engine ended and, off a terminal, where an answer failed.
        """
        if one_turn:
            self._answer(self._terminal.read_all().strip())
            return
        while True:
            try:
                text = self._terminal.read()
            except KeyboardInterrupt:
                if not self._terminal.interactive:
                    raise
                print()
                continue
            if text is None:
                if self._terminal.interactive:
                    print()
                return
            if text.startswith("/"):
                if text.strip() == "/quit":
                    return
                self._obey(text)
            elif text.strip():
                self._answer(text)

    def _obey(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        try:
            match name:
                case "/help":
                    self._terminal.tell(HELP)
                case "/reset" if not rest:
                    self._conversation.reset()
                case "/system":
                    self._conversation.reset(rest)
                case "/set" if not rest:
                    fields = self._conversation.fields
                    self._terminal.tell(
                        "\n".join(f"{name} {value}" for name, value in fields.items()) or "nothing is set"
                    )
                case "/set":
                    self._conversation.set(rest)
                case "/save" if rest:
                    path = Path(rest).expanduser()
                    self._conversation.save(path)
                    self._terminal.tell(f"saved in {path}")
                case _:
                    raise InputError(f"{line.strip()!r} is no command; /help lists them")
        except InputError as error:
            if not self._terminal.interactive:
                raise
            self._terminal.tell(str(error))

    def _answer(self, text: str) -> None:
        from paceline.launcher.clients.conversation import AnswerFailed

        try:
            note = str(self._runner.run(self._conversation.ask(text, self._terminal.show)))
        except KeyboardInterrupt:
            if not self._terminal.interactive:
                raise
            note = "stopped"
        except AnswerFailed as error:
            if self._local is not None and self._local.has_ended:
                self._terminal.end_answer("")
                raise self._local.failure() from error
            if not self._terminal.interactive:
                self._terminal.end_answer("")
                raise EngineError(str(error)) from error
            note = str(error)
        self._terminal.end_answer(note)
