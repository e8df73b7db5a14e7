"""The program: `python -m paceline.launcher COMMAND …`, one process a rank."""

from __future__ import annotations

import io
import logging
import os
import sys
import time

from paceline.coordinator.errors import EngineError, InputError
from paceline.launcher import generate, verify
from paceline.launcher.bench import serve as bench_serve
from paceline.launcher.clients import batch, chat
from paceline.launcher.options import OneLineParser
from paceline.launcher.serving import serve

EXIT_ENGINE_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
LISTENING_SECONDS = 3.0
"""How long ranks that met the same bad input as rank 0, or the same difference, let it end first."""


def main() -> None:
    """Run a command; a failure is one line on stderr and a non-zero exit status on every rank."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run a command and return the process's exit status."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        # What a start decides and how long it took. Other ranks say only what Python shows of itself: warnings.
        logging.basicConfig(level=logging.WARNING, format="paceline: %(message)s")
        logging.getLogger("paceline").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal or a pipe of another encoding than UTF-8 shows what it has, as Python's standard error does.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        parser = OneLineParser(prog="paceline", description="Tensor-parallel inference of language models.")
        commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=OneLineParser)
        generate.add_parser(commands)
        serve.add_parser(commands)
        verify.add_parser(commands)
        chat.add_parser(commands)
        batch.add_parser(commands)
        bench_serve.add_parser(commands, OneLineParser)
        if rank > 0 and {"-h", "--help"} & set(argv):
            return 0  # rank 0 prints it
        arguments = parser.parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()  # here, where it is an error like any other, and not while Python ends
    except (InputError, verify.VerificationFailed) as error:
        # Every rank meets the same bad input, or is told of it, and of what differs; one of them says so.
        if rank == 0:
            _say(str(error))
        else:
            # torchrun ends all ranks once one exits, and the one that speaks must not be cut off.
            time.sleep(LISTENING_SECONDS)
        return EXIT_BAD_INPUT if isinstance(error, InputError) else EXIT_ENGINE_FAILED
    except EngineError as error:
        _say(f"rank {rank}: {error}" if rank else str(error))
        return EXIT_ENGINE_FAILED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); nothing more can be said on stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ENGINE_FAILED
    except OSError as error:
        _say(f"cannot go on: {error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write cannot be written either
        return EXIT_ENGINE_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _say(message: str) -> None:
    for handler in logging.root.handlers:
        handler.flush()  # what was logged comes first
    print(f"paceline: {' '.join(message.split())}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
