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


def refusals_name_a_field(context: Any, response: Any, case: Any) -> None:
    """In place of "what fits the schema is taken", which does not hold for what is posted: ranges are the sampling
    parameters' own, most schemas are not those of a tokenizer's ids or of a template's variables, and fields depend on
    each other. So a 400 has to say which field it is about."""
    if response.status_code == 400 and case.meta.generation.mode is GenerationMode.POSITIVE:
        assert response.json()["error"]["param"], response.text


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
        if method == "POST":
            case.call_and_validate(
                excluded_checks=[positive_data_acceptance], additional_checks=[refusals_name_a_field]
            )
        else:
            case.call_and_validate()

    check()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_a_stream_is_one_that_is_described(schema: Any, path: str, body: dict[str, Any]) -> None:
    """Few of the bodies above ask for one."""
    case = schema[path]["POST"].Case(body={**body, "stream": True}, media_type="application/json")
    assert case.call_and_validate().headers["content-type"][0].startswith("text/event-stream")


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
