"""What a request wants of its tools, checked, and the grammar that holds an answer to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.coordinator.errors import InputError
from paceline.launcher.dialects.dialect import Dialect
from paceline.launcher.dialects.grammar import (
    ANY_OBJECT,
    Function,
    TokenIds,
    calls_grammar,
    object_grammar,
    text_or_calls_grammar,
)
from paceline.launcher.dialects.tool_formats import ToolFormat
from paceline.launcher.serving.errors import bad_request
from paceline.launcher.serving.tool_schemas import Choice, FunctionDefinition, FunctionName


@dataclass(frozen=True)
class ToolUse:
    """Tools that an answer may or must call."""

    tool_format: ToolFormat
    """How the model writes calls."""
    told: Sequence[FunctionDefinition]
    """What the model is told of."""
    functions: Sequence[FunctionDefinition]
    """What it may call."""
    required: bool
    """Whether the answer must be a call."""
    several: bool
    """Whether it may hold more calls than one."""
    path: str
    """Where in the request a function stands, {} being its place."""

    @property
    def names(self) -> list[str]:
        """Of the functions that may be called."""
        return [function.name for function in self.functions]

    @property
    def schemas(self) -> list[tuple[str, str]]:
        """The schemas that calls are held to: where in the request each stands, and its grammar."""
        return [
            (f"{self.path.format(place)}.parameters", object_grammar(function.parameters or ANY_OBJECT))
            for place, function in enumerate(self.told)
            if function in self.functions and (self.required or function.strict)
        ]

    def grammar(self, token_ids: TokenIds) -> str | None:
        """What answers have to follow; None where the model is free, as it is without strict functions."""
        if self.required:
            functions = [Function(each.name, each.parameters or ANY_OBJECT) for each in self.functions]
            return calls_grammar(self.tool_format, token_ids, functions, several=self.several)
        if any(each.strict for each in self.functions):
            functions = [
                Function(each.name, (each.parameters if each.strict else None) or ANY_OBJECT) for each in self.functions
            ]
            return text_or_calls_grammar(self.tool_format, token_ids, functions, several=self.several)
        return None


def read_tools(
    functions: Sequence[FunctionDefinition],
    choice: Choice | FunctionName | None,
    parallel: bool | None,
    dialect: Dialect,
    *,
    path: str = "tools[{}].function",
) -> ToolUse | None:
    """The use of tools that these fields of a request ask for; None where the model is told of none.

    path: where in the request a function stands, {} being its place. Raises ApiError (400) naming a field that cannot
    be obeyed.
    """
    named = choice.name if isinstance(choice, FunctionName) else None
    if not functions:
        if named is not None or choice == "required":
            raise bad_request("tool_choice asks for a call, and there are no tools", "tool_choice")
        return None
    names = [function.name for function in functions]
    for place, function in enumerate(functions):
        where = path.format(place)
        if function.name in names[:place]:
            raise bad_request(f"{where}.name is the name of two functions", f"{where}.name")
        _check_schema(function, f"{where}.parameters")
    if choice == "none":
        return None
    if dialect.tools is None:
        raise bad_request(f"tools cannot be used: {dialect.no_tools}", "tools", "unsupported_parameter")
    if named is not None and named not in names:
        raise bad_request(f"tool_choice names {named!r}, which is none of the tools", "tool_choice")
    return ToolUse(
        dialect.tools,
        functions,
        functions if named is None else [functions[names.index(named)]],
        required=named is not None or choice == "required",
        several=parallel is not False and named is None,
        path=path,
    )


def _check_schema(function: FunctionDefinition, where: str) -> None:
    """The arguments of a call are an object."""
    schema = function.parameters or ANY_OBJECT
    if schema.get("type", "object") != "object":
        raise bad_request(f"{where} must be a JSON schema of type object", where)
    try:
        object_grammar(schema)
    except InputError as error:
        raise bad_request(f"{where}: {error}", where) from error
