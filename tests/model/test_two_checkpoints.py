"""A model.safetensors beside the index of other files: which of the two is loaded, and when nobody can know.

transformers 5.24 takes model.safetensors wherever there is one, other engines the index.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.errors import CheckpointError
from paceline.model.staging import StagingMemory
from paceline.model.weight_index import INDEX_NAME
from paceline.model.weights import load_model

NORM = "model.norm.weight"
PARTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def load(folder: Path) -> CausalLM:
    with StagingMemory(torch.device("cpu"), 1) as staging:
        config = ModelConfig.from_folder(folder)
        return load_model(folder, config, SingleRank(), staging, torch.float32, max_model_len=64)


@pytest.fixture
def folder(own_tiny: Callable) -> Path:
    """One with a checkpoint in one file, and with the index of another, whose norms are twice as large."""
    found: Path = own_tiny().folder
    content = load_file(found / "model.safetensors")
    twice = {name: tensor * 2 if "norm" in name else tensor for name, tensor in content.items()}
    weight_map = {name: PARTS["layers.1" in name] for name in content}
    for part in PARTS:
        save_file({name: twice[name] for name in content if weight_map[name] == part}, found / part)
    (found / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return found


def test_both_are_refused_and_it_is_said_what_to_delete(folder: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value) == (
        f"{folder} holds two checkpoints, model.safetensors and the files of {INDEX_NAME} ({PARTS[0]} to {PARTS[1]}); "
        f"delete model.safetensors, or {INDEX_NAME} and its files"
    )
    (folder / PARTS[0]).unlink()
    with pytest.raises(CheckpointError, match=rf"holds two checkpoints, .* \({PARTS[1]}\)"):
        load(folder)


def test_what_the_message_says_to_delete_is_enough(folder: Path) -> None:
    single = (folder / "model.safetensors").read_bytes()
    norm = load_file(folder / "model.safetensors")[NORM]
    (folder / "model.safetensors").unlink()
    assert torch.equal(load(folder).get_parameter(NORM), norm * 2)
    (folder / "model.safetensors").write_bytes(single)
    for name in (INDEX_NAME, *PARTS):
        (folder / name).unlink()
    assert torch.equal(load(folder).get_parameter(NORM), norm)


def test_an_index_whose_files_are_gone_is_passed_over_as_in_transformers(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    norm = load_file(folder / "model.safetensors")[NORM]
    for part in PARTS:
        (folder / part).unlink()
    with caplog.at_level(logging.INFO, "paceline"):
        assert torch.equal(load(folder).get_parameter(NORM), norm)
    said = [record.getMessage() for record in caplog.records]
    assert f"not read, since none of the files that it names is there: {INDEX_NAME}" in said
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(reference.get_parameter(NORM), norm)


def test_an_index_that_names_the_single_file_too_is_followed(folder: Path) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"][NORM] = "model.safetensors"
    (folder / INDEX_NAME).write_text(json.dumps(index))
    norm = load_file(folder / "model.safetensors")[NORM]
    first = "model.layers.0.input_layernorm.weight"
    model = load(folder)
    assert torch.equal(model.get_parameter(NORM), norm)
    assert torch.equal(model.get_parameter(first), load_file(folder / PARTS[0])[first])
