"""Typed access to the fields of a JSON object written by others: null means absent, and a bad value is named."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.model.errors import ModelConfigError
from paceline.model.regular_files import read_regular
from paceline.model.safetensors_header import HeaderError, check_is_no_pointer

MOST_NESTING = 100
"""Levels of objects and lists. Far beyond them Python cannot compare or copy a value any more; files have some six."""
MAX_SIZE = 2**24
"""Most of a size, more than ten times what models have. Products of sizes and numbers of bytes stay far below 2**63,
and float32, in which angles are computed, tells all positions up to it apart."""
MIN_NUMBER, MAX_NUMBER = 1e-18, 1e18
"""Of numbers that are not whole: their products and powers stay finite."""
_MOST_CHARACTERS = 100
"""Of a value that a message shows."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelConfigError, which names the file, where it is absent or is none."""
    try:
        content = read_regular(path)
        check_is_no_pointer(content)
        found = json.loads(content.decode(), parse_int=_whole_number)
    except FileNotFoundError:
        raise ModelConfigError(f"{path} does not exist: the model must be a folder with a config.json") from None
    except OSError as error:
        raise ModelConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except HeaderError as error:
        raise ModelConfigError(f"{path} {error}") from None
    except UnicodeDecodeError as error:
        raise ModelConfigError(f"{path} cannot be read: it is no UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ModelConfigError(f"{path} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise _too_nested(path) from None
    if not isinstance(found, dict):
        raise ModelConfigError(f"{path} must hold a JSON object, not {shown(found)}")
    if _is_too_nested(found):
        raise _too_nested(path)
    return found


class LongNumber:
    """A whole number of some thousand digits, which Python does not convert: what no field takes."""

    def __init__(self, digits: str) -> None:
        self._digits = digits

    def __repr__(self) -> str:
        return f"{self._digits[:20]}… ({len(self._digits):,} digits)"


class JsonFields:
    """The fields of one object; each method raises ModelConfigError naming the field where its value is unusable."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where

    def get(self, name: str) -> Any:
        """The raw value, None where absent."""
        return self._fields.get(name)

    def size(self, name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A whole number from 1 to `most`; required where there is no default."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.error(f"{name} must be a whole number from 1 to {most}, got {shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number from MIN_NUMBER to MAX_NUMBER; required where there is no default."""
        value = self._value(name, default)
        # NaN is in no range.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not MIN_NUMBER <= value <= MAX_NUMBER:
            raise self.error(f"{name} must be a number from {MIN_NUMBER:g} to {MAX_NUMBER:g}, got {shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, got {shown(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required where there is no default."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name} must be a string, got {shown(value)}")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One token id of the vocabulary or a list of them; empty where absent."""
        value = self._fields.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise self.error(
                    f"{name} must be a token id or a list of them, whole numbers from 0 to {vocab_size - 1}, "
                    f"got {shown(value)}"
                )
        return tuple(ids)

    def error(self, problem: str) -> ModelConfigError:
        """The error that says where the problem is."""
        return ModelConfigError(f"{self._where}: {problem}")

    def _value(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing")
        return value


def merge_spellings(where: str, *groups: Mapping[str, Any]) -> dict[str, Any]:
    """One object out of several that may state the same field; ModelConfigError where two of them disagree."""
    merged: dict[str, Any] = {}
    for group in groups:
        for name, value in group.items():
            if value is None:
                continue
            first = merged.setdefault(name, value)
            if first is not value and first != value:
                raise ModelConfigError(f"{where}: {name} is given twice, as {shown(first)} and as {shown(value)}")
    return merged


def shown(value: object) -> str:
    """The value as a message shows it: one line, cut short."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = _MOST_CHARACTERS
    text = short.repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def _whole_number(digits: str) -> int | LongNumber:
    try:
        return int(digits)
    except ValueError:
        return LongNumber(digits)


def _is_too_nested(content: object) -> bool:
    level = [content]
    for _ in range(MOST_NESTING):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, (dict, list)) for each in level)


def _too_nested(path: Path) -> ModelConfigError:
    return ModelConfigError(f"{path} cannot be read: its lists and objects are nested more than {MOST_NESTING} deep")
