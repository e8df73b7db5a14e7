"""What all request bodies share: a field that is not listed is an error that names it, and so is a wrong type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from paceline.launcher.serving.errors import bad_request


class Body(BaseModel):
    """A JSON object of a request. Values stay as JSON has them: "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Known fields that are not supported, and the values beside null that ask for nothing."""
    INSTEAD: ClassVar[Mapping[str, str]] = {}
    """What to use in place of some of them."""

    @model_validator(mode="before")
    @classmethod
    def _take_out_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in cls.NEUTRAL.keys() & values.keys():
            value = values[name]
            # The types are compared too: 1 == True.
            if value is not None and not any(
                type(value) is type(neutral) and value == neutral for neutral in cls.NEUTRAL[name]
            ):
                advice = f"; {cls.INSTEAD[name]}" if name in cls.INSTEAD else ""
                raise bad_request(f"{name} is not supported by this server{advice}", name, "unsupported_parameter")
        return {name: value for name, value in values.items() if name not in cls.NEUTRAL}
