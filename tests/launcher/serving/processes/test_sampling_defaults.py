"""What `serve` takes of a checkpoint's generation_config.json."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any


def test_what_a_request_leaves_open_is_as_the_model_s_makers_have_it(
    serve: Callable[..., Any], own_tiny: Callable[..., Any]
) -> None:
    folder = own_tiny().folder
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 1}')
    server = serve(model=str(folder)).wait_ready()

    def tokens(**fields: Any) -> list[str]:
        found: list[str] = server.complete(logprobs=0, ignore_eos=True, **fields)["choices"][0]["logprobs"]["tokens"]
        return found

    assert len(tokens()) == 8
    assert tokens(temperature=None) == tokens()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == (0, "")
    (ready,) = [line for line in server.log if line["event"] == "ready"]
    assert ready["sampling_defaults"] == {"temperature": 0.6, "top_k": 1}


def test_a_value_that_no_request_could_have_is_one_line(
    serve: Callable[..., Any], own_tiny: Callable[..., Any]
) -> None:
    folder = own_tiny().folder
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    status, errors = serve(model=str(folder)).end()
    assert status == 2
    assert errors == f"paceline: {folder}/generation_config.json: top_p must be from 0 to 1, got 7"
