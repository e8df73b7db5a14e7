"""Quantised checkpoints are refused by their method's name, whatever the JSON that tells of it looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_configs import LLAMA

from paceline.model.config import ModelConfig
from paceline.model.errors import ModelConfigError
from paceline.model.quantization import QUANTIZATION_FILES

NAMELESS: tuple[Any, ...] = (False, True, 0, 8, 1.5, "", [], ["x"], [["x"]], {}, {"a": [{}]})
"""What names no method."""


def refusal(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    with pytest.raises(ModelConfigError) as error:
        ModelConfig.from_folder(folder)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{folder}/")


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [
        ("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}', "'FP8'"),
        ("hf_quant_config.json", '{"quantization": "FP8"}', "'FP8'"),
        ("quantize_config.json", '{"bits": 4, "group_size": 128}', "'gptq'"),
        ("quant_config.json", '{"w_bit": 4, "version": "GEMM"}', "'GEMM'"),
        ("quant_config.json", '{"quant_method": ["awq"], "version": "GEMM"}', "'GEMM'"),
        ("quant_config.json", '{"quantization": null}', "of an unknown method"),
    ],
)
def test_files_beside_config_json(name: str, content: str, method: str, tmp_path: Path) -> None:
    """Field report B11, where config.json says nothing."""
    (tmp_path / name).write_text(content)
    wanted = f"{name}: quantization {method} is not supported; use the unquantized checkpoint"
    assert refusal(tmp_path) == wanted


@pytest.mark.parametrize("name", QUANTIZATION_FILES)
@pytest.mark.parametrize("field", ["quantization", "quant_method", "quant_algo", "version"])
def test_any_value_in_their_fields(name: str, field: str, tmp_path: Path) -> None:
    unnamed = "'gptq'" if name == "quantize_config.json" else "of an unknown method"
    for value in (None, *NAMELESS):
        (tmp_path / name).write_text(json.dumps({field: value}))
        assert refusal(tmp_path) == f"{name}: quantization {unnamed} is not supported; use the unquantized checkpoint"
    (tmp_path / name).write_text(json.dumps({field: "two\nlines\ud800" + "x" * 1000}))
    assert f"{name}: quantization 'two\\nlines\\ud800xxx" in refusal(tmp_path)


@pytest.mark.parametrize("name", QUANTIZATION_FILES)
@pytest.mark.parametrize("content", ["null", "true", "1", '"fp8"', "[]", "[[1]]"])
def test_what_is_no_object(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert refusal(tmp_path).startswith(f"{name} must hold a JSON object, not ")


def test_any_value_in_config_json(tmp_path: Path) -> None:
    told = "config.json: quantization_config: quantization {} is not supported; use the unquantized checkpoint"
    for value in NAMELESS:
        for nested in (value, {"quant_method": value}):
            assert refusal(tmp_path, quantization_config=nested) == told.format("of an unknown method")
    assert refusal(tmp_path, quantization_config="fp8") == told.format("'fp8'")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": None}))
    assert ModelConfig.from_folder(tmp_path).vocab_size == 256
