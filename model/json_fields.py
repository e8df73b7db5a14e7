"""Typed access to the fields of a JSON object written by others: null means absent, and a bad value is named."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.model.errors import ModelConfigError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelConfigError where it is absent or is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{path} does not exist: the model must be a folder with a config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


class JsonFields:
    """The fields of one object; each method raises ModelConfigError naming the field where its value is unusable."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where

    def get(self, name: str) -> Any:
        """The raw value, None where absent."""
        return self._fields.get(name)

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 on; required where there is no default."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{name} must be a whole number from 1 on, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; required where there is no default."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.error(f"{name} must be a number above 0, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, got {value!r}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required where there is no default."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name} must be a string, got {value!r}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where absent."""
        value = self._fields.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise self.error(f"{name} must be a token id or a list of them, got {value!r}")
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
            if merged.setdefault(name, value) != value:
                raise ModelConfigError(f"{where}: {name} is given twice, as {merged[name]!r} and as {value!r}")
    return merged
