"""What a checkpoint's generation_config.json says of sampling holds where nobody says otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.coordinator.errors import InputError
from paceline.launcher.sampling_defaults import read_sampling_defaults

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def written(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"repetition_penalty": 1.05, "top_k": None, "max_new_tokens": 7}, {"repetition_penalty": 1.05}),
        (QWEN3 | {"do_sample": False}, {}),
        ({"temperature": 0}, {"temperature": 0}),
        ({}, {}),
    ],
    ids=["Qwen3", "others", "nothing is sampled", "greedy", "empty"],
)
def test_what_is_read(content: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    assert read_sampling_defaults(written(tmp_path, content)) == expected


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": -1}, r"generation_config\.json: temperature must be"),
        ({"top_k": "many"}, r"generation_config\.json: top_k must be a whole number"),
        ({"top_p": True}, r"generation_config\.json: top_p must be"),
        ('{"min_p": NaN}', r"generation_config\.json: min_p must be"),
        ("[1]", r"generation_config\.json"),
        ("{", r"generation_config\.json"),
    ],
)
def test_a_value_that_no_request_could_have_is_named(content: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        read_sampling_defaults(written(tmp_path, content))


def test_llm_takes_them_where_it_is_given_no_params(own_tiny: Callable[..., Any]) -> None:
    folder = written(own_tiny().folder, {"top_k": 1.5})
    prompts = [[1, 2, 3], [4, 5]]
    with LLM(folder, device="cpu", num_blocks=64) as llm:
        with pytest.raises(InputError, match="top_k"):
            llm.generate(prompts)
        written(folder, {"temperature": 1.5, "top_k": 1})
        assert llm.get_default_sampling_params() == SamplingParams(temperature=1.5, top_k=1)
        greedy = SamplingParams(temperature=0)
        for answers in (llm.generate(prompts), llm.generate(prompts, greedy)):
            assert [output.outputs[0].token_ids for output in answers] == [
                output.outputs[0].token_ids for output in llm.generate(prompts, greedy)
            ]
