"""The server keeps to its own description, whatever it is sent that fits it, and whatever does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{name}", "/health", "/ready", "/metrics", "/v1/load", "/v1/engine")
# Not all that fits the schema is served: ranges are the sampling parameters' own, and fields depend on each other.
EXCLUDED = [positive_data_acceptance]


@pytest.fixture
def schema(serve: Any) -> Iterator[Any]:
    served = serve()
    served.engine.script = served.ids("a short answer")
    yield schemathesis.openapi.from_asgi("/openapi.json", served.app)
    assert served.engine.running == {}
    assert served.app.state.admission.accepted == 0


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *(("POST", path, mode) for path in POSTS for mode in GenerationMode),
        *(("GET", path, GenerationMode.POSITIVE) for path in GETS),  # they take nothing that could be wrong
    ],
)
def test_every_answer_is_one_that_is_described(schema: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = schema[path][method]

    @hypothesis.settings(
        max_examples=60 if method == "POST" else 5,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.call_and_validate(excluded_checks=EXCLUDED)

    check()


def test_what_is_described_is_what_there_is(serve: Any) -> None:
    written = serve().app.openapi()
    assert set(written["paths"]) == {*POSTS, *GETS}
    for path in POSTS[:3]:
        responses = written["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "404", "413", "429", "500", "503", "504"}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "422" not in str(written["paths"])


def test_keys_are_described_where_there_are_any(serve: Any) -> None:
    written = serve(api_keys=("sk-right",)).app.openapi()
    assert written["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert written["security"] == [{"key": []}]
    for path in GETS:
        is_open = path in ("/health", "/ready")
        for operation in written["paths"][path].values():
            assert ("401" in operation["responses"], operation.get("security")) == (
                (False, []) if is_open else (True, None)
            )
    assert "securitySchemes" not in serve().app.openapi()["components"]
