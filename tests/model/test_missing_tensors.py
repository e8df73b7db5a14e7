"""What is certainly missing is said beside every other fault, and no fault stays untold because there are many."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.model.communicator import Communicator, SingleRank, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.errors import CheckpointError
from paceline.model.staging import StagingMemory
from paceline.model.weight_index import INDEX_NAME
from paceline.model.weights import load_model

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
NORM = "model.norm.weight"
NORM_IS_MISSING = f"tensor {NORM} of shape [64] is missing"
Q_IS_MISSING = f"tensor {Q_PROJ} of shape [64, 64] is missing"


def message(folder: Path, comm: Communicator | None = None) -> str:
    """What loading is refused with, after the folder's name."""
    comm = comm or SingleRank()
    with StagingMemory(torch.device("cpu"), comm.size) as staging, pytest.raises(CheckpointError) as error:
        load_model(folder, ModelConfig.from_folder(folder), comm, staging, torch.float32, max_model_len=64)
    return str(error.value).removeprefix(f"checkpoint {folder} cannot be loaded: ")


@pytest.fixture
def without(own_tiny: Callable) -> Callable[..., Path]:
    """without(names): the folder of a tiny Llama in one file, which lacks them."""

    def make(names: Sequence[str] = (NORM,)) -> Path:
        folder: Path = own_tiny().folder
        content = load_file(folder / "model.safetensors")
        save_file({name: content[name] for name in content if name not in names}, folder / "model.safetensors")
        return folder

    return make


def split(folder: Path, first: Sequence[str]) -> tuple[Path, Path]:
    """Put these tensors into a file of their own, and the rest into another, with an index."""
    content = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    paths = folder / "model-1.safetensors", folder / "model-2.safetensors"
    parts = [{name: content[name] for name in content if (name in first) == here} for here in (True, False)]
    weight_map: dict[str, str] = {}
    for path, part in zip(paths, parts, strict=True):
        save_file(part, path)
        weight_map |= dict.fromkeys(part, path.name)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return paths


def test_beside_a_tensor_that_is_given_twice(without: Callable) -> None:
    folder = without()
    save_file({Q_PROJ: torch.zeros(64, 64)}, folder / "other.safetensors")
    assert message(folder) == f"tensor {Q_PROJ} is in both model.safetensors and other.safetensors; {NORM_IS_MISSING}"


def test_beside_a_file_that_is_no_part_of_the_checkpoint(without: Callable) -> None:
    """The tensors of model.safetensors are all in model.safetensors."""
    folder = without()
    (folder / "other.safetensors").write_bytes(b"not weights")
    assert message(folder) == f"other.safetensors is not a safetensors file; {NORM_IS_MISSING}"


def test_what_an_unreadable_file_may_hold_is_not_called_missing(without: Callable) -> None:
    folder = without()
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    (folder / "part-2.safetensors").write_bytes(b"not weights")
    assert message(folder) == "part-2.safetensors is not a safetensors file"
    (folder / "part-2.safetensors").unlink()
    (folder / "part-2.safetensors").symlink_to(folder / "gone")
    assert message(folder) == "part-2.safetensors cannot be opened: No such file or directory"


def test_a_file_cut_short_still_says_what_it_should_hold(without: Callable) -> None:
    folder = without()
    path = folder / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 4)
    cut = f"model.safetensors is cut short: it has {size - 4} bytes, and its header speaks of {size}"
    assert message(folder) == f"{cut}; {NORM_IS_MISSING}"


def test_beside_a_file_of_the_index_that_cannot_be_read(without: Callable) -> None:
    folder = without()
    path, _ = split(folder, [Q_PROJ, K_PROJ])
    path.unlink()
    assert message(folder) == f"model-1.safetensors cannot be opened: No such file or directory; {NORM_IS_MISSING}"
    path.write_bytes(b"not weights")
    assert message(folder) == f"model-1.safetensors is not a safetensors file; {NORM_IS_MISSING}"


def test_beside_an_index_that_misplaces_a_tensor(without: Callable) -> None:
    folder = without()
    split(folder, [Q_PROJ, K_PROJ])
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"][Q_PROJ] = "model-2.safetensors"
    (folder / INDEX_NAME).write_text(json.dumps(index))
    misplaced = f"{INDEX_NAME} puts tensor {Q_PROJ} into model-2.safetensors, which lacks it"
    assert message(folder) == f"{misplaced}; {NORM_IS_MISSING}"
    index["weight_map"][Q_PROJ] = "model-2.bin"
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert message(folder).endswith(
        f"which is not a .safetensors file, the only format of weights that is read; {NORM_IS_MISSING}"
    )


def test_a_tensor_stored_as_one_with_others_in_a_file_that_cannot_be_read(without: Callable) -> None:
    folder = without([Q_PROJ, NORM])
    split(folder, [K_PROJ])
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"][Q_PROJ.replace("q_proj", "qkv_proj")] = "model-3.safetensors"
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert message(folder) == f"model-3.safetensors cannot be opened: No such file or directory; {NORM_IS_MISSING}"


def test_what_the_index_does_not_name_is_missing_though_an_unnamed_file_has_it(without: Callable) -> None:
    folder = without([])
    path, _ = split(folder, [Q_PROJ])
    index = json.loads((folder / INDEX_NAME).read_text())
    del index["weight_map"][Q_PROJ]
    (folder / INDEX_NAME).write_text(json.dumps(index))
    path.write_bytes(b"not weights")
    assert message(folder) == Q_IS_MISSING


def test_all_of_many_faults_are_logged(without: Callable, caplog: pytest.LogCaptureFixture) -> None:
    folder = without([])
    names = sorted(load_file(folder / "model.safetensors"))
    without(names[:11])
    refusals = run_simulated_ranks(2, lambda comm: message(folder, comm))
    assert refusals[0] == refusals[1]
    assert refusals[0].endswith("; and 1 more")
    assert refusals[0].count(" is missing") == 10
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert sorted(line.split()[1] for line in lines) == names[:11]  # each once, though both ranks know of all
    assert all(line.startswith("tensor ") and line.endswith(" is missing") for line in lines)


def test_ten_faults_are_in_the_message_and_not_logged(without: Callable, caplog: pytest.LogCaptureFixture) -> None:
    folder = without([])
    names = sorted(load_file(folder / "model.safetensors"))
    assert message(without(names[:10])).count(" is missing") == 10
    assert not [record for record in caplog.records if record.levelno == logging.ERROR]


def test_the_rank_that_saw_them_logs_many_bad_values(own_tiny: Callable, caplog: pytest.LogCaptureFixture) -> None:
    folder = own_tiny(num_hidden_layers=6).folder
    content = load_file(folder / "model.safetensors")
    names = sorted(name for name in content if "q_proj" in name or "gate_proj" in name)
    for name in names:
        content[name][-1, 0] = float("nan")  # rank 1's
    save_file(content, folder / "model.safetensors")

    def body(comm: Communicator) -> str:
        return message(folder, comm) if comm.rank == 1 else ""

    assert run_simulated_ranks(2, body)[1].endswith("; and 2 more")
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [line.partition(" in ")[0] for line in lines] == [f"rank 1: tensor {name}" for name in names]
