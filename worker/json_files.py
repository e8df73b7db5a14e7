"""JSON files of a checkpoint's folder, for those who have no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.coordinator.errors import InputError
from paceline.model.errors import ModelConfigError
from paceline.model.json_fields import read_json_object


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError, which names the file, where it is none."""
    try:
        return read_json_object(path)
    except ModelConfigError as error:
        raise InputError(str(error)) from error
