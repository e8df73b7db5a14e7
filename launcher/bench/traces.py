"""Recorded request streams: when requests came, how long they were, which prefixes they shared.

Azure's (github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_*.csv) are CSV of TIMESTAMP, ContextTokens,
GeneratedTokens. Mooncake's (github.com/kvcache-ai/Mooncake, FAST25-release) are JSON lines of timestamp (ms),
input_length, output_length and hash_ids: an id for each block of 512 prompt tokens, the last perhaps not full, which
is equal where prompts are equal up to and including that block.
"""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from paceline.coordinator.checks import is_int, shown
from paceline.coordinator.errors import InputError
from paceline.launcher.json_text import parse_json

BLOCK_TOKENS = 512
"""Prompt tokens that one of Mooncake's hash ids stands for."""
_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_MICROSECONDS = 26
"""Characters of a time with six decimals; Azure writes seven."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    seconds: float
    """Since the first request."""
    prompt_tokens: int
    output_tokens: int
    block_ids: Sequence[int] | None = None
    """One for each BLOCK_TOKENS of the prompt, where the trace knows what prompts share."""


def read_trace(path: Path) -> Iterator[TraceRow]:
    """The requests of a trace file, plain or gzipped, in the order of their arrival.

    Raises InputError, with the line, for what is neither of the two formats.
    """
    try:
        with _open(path) as file:
            first = file.readline()
            if first.strip() == _AZURE_HEADER:
                yield from _checked(path, 2, map(_azure_row, file))
            elif first.startswith("{"):
                yield from _checked(path, 1, map(_mooncake_row, itertools.chain([first], file)))
            else:
                raise InputError(f"--trace {path} is neither a CSV with the header {_AZURE_HEADER} nor lines of JSON")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--trace {path} cannot be read ({reason})") from error


def _open(path: Path) -> IO[str]:
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8")


def _checked(
    path: Path, first_line: int, rows: Iterator[tuple[float, int, int, Sequence[int] | None]]
) -> Iterator[TraceRow]:
    """The rows, their times counted from the first; a row that cannot be is named by its line."""
    line = first_line
    start = before = None
    while True:
        try:
            row = next(rows, None)
            if row is None:
                break
            seconds, prompt, output, blocks = row
            if not (is_int(prompt) and prompt > 0 and is_int(output) and output >= 0):
                raise ValueError("token counts must be whole numbers")
            if blocks is not None and len(blocks) != -(-prompt // BLOCK_TOKENS):
                raise ValueError(f"{prompt} tokens are not {len(blocks)} blocks of {BLOCK_TOKENS}")
            if before is not None and seconds < before:
                raise ValueError("it came before the line above")
        except (ValueError, KeyError, TypeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise InputError(f"--trace {path}, line {line}: {reason}") from error
        start = seconds if start is None else start
        before = seconds
        yield TraceRow(seconds - start, prompt, max(output, 1), blocks)
        line += 1
    if start is None:
        raise InputError(f"--trace {path} holds no requests")


def _azure_row(line: str) -> tuple[float, int, int, None]:
    cells = line.strip().split(",")
    if len(cells) != 3 or not all(cell.isascii() and cell.isdigit() for cell in cells[1:]):
        raise ValueError(f"it must be a time and two whole numbers, as in {_AZURE_HEADER}")
    try:
        time = datetime.fromisoformat(cells[0][:_MICROSECONDS])
    except ValueError as error:
        raise ValueError(f"TIMESTAMP must be like 2023-11-16 18:15:46.6805900, got {shown(cells[0])}") from error
    return time.timestamp(), int(cells[1]), int(cells[2]), None


def _mooncake_row(line: str) -> tuple[float, int, int, Sequence[int]]:
    row = parse_json(line)
    blocks = row["hash_ids"]
    if not isinstance(blocks, list) or not all(is_int(block) for block in blocks):
        raise ValueError("hash_ids must be whole numbers")
    if not isinstance(row["timestamp"], (int, float)):
        raise ValueError(f"timestamp must be a number of milliseconds, got {shown(row['timestamp'])}")
    return row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(blocks)
