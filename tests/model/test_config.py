"""What is read from config.json, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_configs import LLAMA, LLAMA3

from paceline.model.config import ModelConfig
from paceline.model.errors import ModelConfigError
from paceline.model.rope_config import RopeConfig


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(LLAMA | changes, generation)


def test_absent_and_null_fields_have_their_familys_defaults() -> None:
    nulls = dict.fromkeys(
        ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_scaling", "tie_word_embeddings", "hidden_act"]
    )
    config = parse(**nulls)
    assert config == ModelConfig.from_dict({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.max_position_embeddings, config.tie_word_embeddings, config.dtype) == (2048, False, "float32")
    assert config.rope == RopeConfig(rope_type="default", theta=10000.0)
    qwen3 = parse(architectures=["Qwen3ForCausalLM"])
    assert (qwen3.head_dim, qwen3.max_position_embeddings) == (128, 32768)
    assert parse(architectures=["Qwen2ForCausalLM"]).head_dim == 16


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_config_that_transformers_wrote_says_what_its_object_says(family: str, tiny: Callable) -> None:
    checkpoint = tiny(family, tie_word_embeddings=False)
    ours, theirs = ModelConfig.from_folder(checkpoint.folder), checkpoint.reference.config
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.dtype == "float32"


def test_both_spellings_of_the_dtype() -> None:
    assert parse(torch_dtype="bfloat16").dtype == "bfloat16"
    assert parse(dtype="float16", torch_dtype="float16").dtype == "float16"


def test_end_of_text_ids_of_both_files_are_joined() -> None:
    assert parse(eos_token_id=7).eos_token_ids == (7,)
    assert parse({"eos_token_id": [9, 7]}, eos_token_id=7).eos_token_ids == (7, 9)
    assert parse({"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
        {"rope_scaling": {"type": "llama3"} | {k: v for k, v in LLAMA3.items() if k != "rope_type"}, "rope_theta": 5e5},
        {"rope_scaling": LLAMA3 | {"type": "llama3"}, "rope_theta": 500000},
        {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "rope_scaling": LLAMA3, "rope_theta": 500000.0},
    ],
    ids=["rope_type", "type", "both-keys", "rope_parameters", "both-objects"],
)
def test_all_spellings_of_rope_fields_mean_the_same(rope: dict[str, Any]) -> None:
    assert parse(**rope).rope == RopeConfig(
        rope_type="llama3",
        theta=500000.0,
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


@pytest.mark.parametrize("scaling", [None, {}, {"type": "default"}, {"rope_type": "default"}])
def test_no_scaling(scaling: Any) -> None:
    assert parse(rope_scaling=scaling, rope_theta=5000.0).rope == RopeConfig(theta=5000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architecture 'MistralForCausalLM' is not supported"),
        ({"architectures": None}, "architectures must hold one of LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        # Field report B11.
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantization 'fp8'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization 'gptq'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": 3}, "layer_types"),
        ({"rope_scaling": LLAMA3 | {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "rope type llama3 needs the field factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "needs the field low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, "high_freq_factor (0.5) must be above low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type linear needs the field factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            "factor must be a number from 1e-18 to 1e+18, got '2'",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor of rope type linear must be at least 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "yarn needs the field original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "llama3", "type": "linear"}}, "rope_type is given twice"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "rope field 'mrope_section'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2**24 + 1}},
            "factor of rope type linear must be at least 1, at most 16777216, got 16777217.0",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"rope_parameters": False}, "rope_parameters must be an object, got False"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is given twice"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"partial_rotary_factor": True}, "partial_rotary_factor must be a number"),
        ({"rope_theta": 0}, "rope_theta must be a number from 1e-18 to 1e+18, got 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads (4) must be a multiple of num_key_value_heads (3)"),
        ({"hidden_size": 63}, "hidden_size (63) must be a multiple of num_attention_heads (4)"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": -1}, "vocab_size must be a whole number from 1 to 16777216, got -1"),
        ({"vocab_size": "256"}, "vocab_size must be a whole number from 1 to 16777216, got '256'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"intermediate_size": 1.5}, "intermediate_size must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number from 1e-18 to 1e+18, got nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id or a list of them"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "dtype is given twice"),
    ],
)
def test_refusals_name_the_field_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        parse(**changes)
    assert message in str(error.value)
    assert str(error.value).startswith("config.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "{", "[]", '"llama"'])
def test_a_folder_without_a_readable_config(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=r"/config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"generation_config\.json"):
        ModelConfig.from_folder(tmp_path)
