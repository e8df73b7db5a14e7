"""What a chat template reads, told from its source: https://jinja.palletsprojects.com/en/stable/api/#the-meta-api"""

from __future__ import annotations

import functools

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser


class _Generation(Extension):
    """transformers' {% generation %} block around an answer."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=4)
def template_variables(source: str) -> frozenset[str] | None:
    """Names of the variables that a template reads; None where its source cannot be understood."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    try:
        return frozenset(find_undeclared_variables(environment.parse(source)))
    except TemplateSyntaxError:
        return None
