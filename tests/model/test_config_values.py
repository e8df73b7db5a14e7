"""Whatever stands in a field of config.json or generation_config.json: the field is named, or the model can be built.

What comes of sizes (shapes, bytes, angles) is computed here for every config that is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_configs import LLAMA, LLAMA3

from paceline.model.config import MAX_LAYERS, ModelConfig
from paceline.model.errors import ModelConfigError
from paceline.model.json_fields import MAX_SIZE
from paceline.model.rope import inverse_frequencies, longest_context
from paceline.model.shard_table import plan_model

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "attention_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "truncate": True,
}
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
FIELDS = (
    *SIZES,
    "architectures",
    "hidden_act",
    "quantization_config",
    "use_sliding_window",
    "layer_types",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "dtype",
    "torch_dtype",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "eos_token_id",
)
"""All that is read of config.json."""
NESTED_FIELDS = (*dict.fromkeys([*LLAMA3, *YARN]), "type", "rope_theta", "partial_rotary_factor")
"""All that is read of its rope_scaling and rope_parameters."""
OTHER_WORDS = {
    "architectures": "architecture ",
    "torch_dtype": "dtype ",
    "rope_type": "rope type ",
    "type": "rope_type",
    "rope_scaling": "rope_type",
    "rope_parameters": "rope_type",
}
"""By which a message names a field instead."""
VALUES: tuple[Any, ...] = (
    *(None, True, False),
    *(0, 1, -1, 3, 2**31, 2**62, 10**20, 10**400, -(10**400)),
    *(0.0, 1.0, 0.5, 96.0, 1e20, 1e308, float("inf"), float("nan"), 5e-324),
    *("", "x", "24", "foo\ud800", "two\nlines", "x" * 10_000),
    *([], [1], ["x"], [["LlamaForCausalLM"]], [[[]]], [None], {}, {"a": 1}, {"a": [{"b": {}}]}, {"rope_type": []}),
)


class Watched(dict[str, Any]):
    """An object that notes which of its fields are looked up."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def check(config: ModelConfig) -> None:
    """What is computed of a config is sane on any number of ranks."""
    for tp in (1, 3):
        plan = plan_model(config, tp, torch.float32)
        assert all(0 < parameter.num_bytes < 2**56 for parameter in plan.parameters)
        assert 0 < plan.kv_bytes_per_token < 2**48
    assert longest_context(config) >= config.max_position_embeddings
    for length in (1, config.max_position_embeddings, MAX_SIZE):
        inv_freq, factor = inverse_frequencies(config, length)
        assert torch.isfinite(inv_freq * MAX_SIZE * factor).all()


def outcome(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> str:
    """The message with which a config is refused, one short line; empty for a config that works."""
    try:
        found = ModelConfig.from_dict(config, generation, where="folder/config.json")
    except ModelConfigError as error:
        message = str(error)
        assert message.startswith("folder/")
        assert message.isprintable()
        assert len(message) < 300
        return message
    check(found)
    return ""


def test_these_are_all_the_fields_that_are_read() -> None:
    config, generation = Watched(LLAMA), Watched({"pad_token_id": 0})
    ModelConfig.from_dict(config, generation)
    assert config.read == set(FIELDS)
    assert generation.read == {"eos_token_id"}


@pytest.mark.parametrize("name", FIELDS)
def test_any_value_in_a_field(name: str) -> None:
    for value in VALUES:
        message = outcome(LLAMA | {name: value})
        assert not message or OTHER_WORDS.get(name, name) in message or name in message, value
        if value is None and name in ("head_dim", "rope_scaling", "eos_token_id", "dtype"):
            assert message == ""


@pytest.mark.parametrize(
    "scaling", [LLAMA3, YARN, {"rope_type": "dynamic", "factor": 2.0}], ids=lambda s: s["rope_type"]
)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", NESTED_FIELDS)
def test_any_value_in_a_field_of_rope(name: str, place: str, scaling: dict[str, Any]) -> None:
    for value in VALUES:
        message = outcome(LLAMA | {place: scaling | {name: value}})
        assert not message or OTHER_WORDS.get(name, name) in message or name in message, value


def test_any_value_in_generation_config() -> None:
    for value in VALUES:
        message = outcome(LLAMA, {"eos_token_id": value})
        assert not message or message.startswith("folder/generation_config.json: eos_token_id must be"), value


def json_values() -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.floats() | st.sampled_from([1, 2, 3, MAX_SIZE, MAX_SIZE + 1, 2**63, 1e18, 1e-18, 1e19])
    scalars = st.none() | st.booleans() | numbers | st.text(max_size=5)
    names = st.sampled_from(["", "rope_type", "factor", "two\nlines", "\ud800", "x" * 200])
    return st.recursive(
        scalars, lambda each: st.lists(each, max_size=3) | st.dictionaries(names, each, max_size=3), max_leaves=6
    )


def sound_numbers() -> st.SearchStrategy[Any]:
    """Those that are taken, the last ones included."""
    ends = st.sampled_from([1e-18, 0.5, 1, 1.0, 1.0000000000000002, 2, 4, 8192, MAX_SIZE, 2.0**24, 1e18])
    return ends | st.floats(1e-18, 1e18) | st.integers(1, MAX_SIZE)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS), json_values(), max_size=4))
def test_any_values_in_several_fields(changes: dict[str, Any]) -> None:
    if changes.get("num_hidden_layers", 0) in range(9, MAX_LAYERS + 1):
        changes["num_hidden_layers"] = 9  # a deep model takes seconds to build
    outcome(LLAMA | changes)


@settings(max_examples=300)
@given(
    st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]),
    st.dictionaries(st.sampled_from(sorted({*NESTED_FIELDS} - {"rope_type", "type", "truncate"})), sound_numbers()),
    st.sampled_from([2, 4, 16, 4096]),
    st.sampled_from([1, 2048, MAX_SIZE]),
)
def test_any_rope_that_is_taken_has_finite_angles(
    rope_type: str, numbers: dict[str, Any], head_dim: int, max_positions: int
) -> None:
    scaling = LLAMA3 | YARN | numbers | {"rope_type": rope_type}
    outcome(LLAMA | {"rope_scaling": scaling, "head_dim": head_dim, "max_position_embeddings": max_positions})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("too_large", ["one more", 2**62, 10**20, 10**400, "9" * 5000])
def test_the_largest_size(name: str, too_large: Any, tmp_path: Path) -> None:
    """One more is refused by name and bound, as written in a file; the largest itself can be planned."""
    most = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
    digits = str(most + 1 if too_large == "one more" else too_large)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {name: "HERE"}).replace('"HERE"', digits))
    with pytest.raises(ModelConfigError) as error:
        ModelConfig.from_folder(tmp_path)
    message = str(error.value)
    assert message.startswith(
        f"{tmp_path}/config.json: {name} must be a whole number from 1 to {most}, got {digits[:8]}"
    )
    assert len(message) < len(str(tmp_path)) + 200


def test_the_largest_model_has_bytes_that_can_be_counted() -> None:
    largest = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), MAX_SIZE)
    for heads, kv_heads, head_dim in ((MAX_SIZE // 2, MAX_SIZE // 2, 2), (2, 1, MAX_SIZE // 2), (4096, 1, 4096)):
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        assert outcome(LLAMA | largest | shape | {"head_dim": head_dim}) == ""
        more = outcome(LLAMA | largest | shape | {"head_dim": head_dim + 2})
        assert f"num_attention_heads ({heads}) times head_dim ({head_dim + 2}) must be at most {MAX_SIZE}" in more


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("digits", ["1" + "0" * 400, "9" * 5000, "1e400", "-1e400", "NaN", "1e-400"])
def test_a_number_beyond_all_measure(name: str, digits: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {name: "HERE"}).replace('"HERE"', digits))
    with pytest.raises(
        ModelConfigError, match=rf"config\.json: {name} must be a number from 1e-18 to 1e\+18, got .{{1,80}}$"
    ):
        ModelConfig.from_folder(tmp_path)


def test_long_numbers_that_are_not_read_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"extra": "HERE"}).replace('"HERE"', "9" * 5000))
    assert ModelConfig.from_folder(tmp_path).vocab_size == 256


def test_the_last_token_id_of_the_vocabulary() -> None:
    assert ModelConfig.from_dict(LLAMA | {"eos_token_id": [255]}).eos_token_ids == (255,)
    message = "eos_token_id must be a token id or a list of them, whole numbers from 0 to 255, got [2, 256]"
    assert outcome(LLAMA | {"eos_token_id": [2, 256]}) == f"folder/config.json: {message}"
    assert outcome(LLAMA, {"eos_token_id": [2, 256]}) == f"folder/generation_config.json: {message}"
