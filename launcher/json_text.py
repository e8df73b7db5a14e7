"""JSON that others have written: people, clients, servers, models."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value. Raises ValueError where there is none, or one of lists in lists without end."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
