"""A head beside a tied embedding is the embedding again, or the checkpoint is refused, with the place where it is not.

transformers 5.24 then takes both for what they are, against config.json.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.model import tied_head
from paceline.model.checkpoint_files import StoredBox
from paceline.model.checkpoint_tensors import CheckpointTensors
from paceline.model.communicator import Communicator, SingleRank, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.errors import CheckpointError, LoadingStopped
from paceline.model.staging import StagingMemory
from paceline.model.tied_head import TiedHeadCheck
from paceline.model.verify_shards import Difference, verify_tied_head
from paceline.model.weights import load_model

CPU = torch.device("cpu")
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
WHAT_TO_CHANGE = "set tie_word_embeddings to false in config.json to load both, or remove the tensor"


def load(folder: Path, comm: Communicator, dtype: torch.dtype = torch.float32, **options: Any) -> CausalLM:
    with StagingMemory(CPU, comm.size) as staging:
        config = ModelConfig.from_folder(folder)
        return load_model(folder, config, comm, staging, dtype, max_model_len=64, **options)


def outcomes(folder: Path, tp: int, dtype: torch.dtype = torch.float32) -> list[str]:
    """What loading says on each rank after the folder's name; empty where it succeeds."""

    def body(comm: Communicator) -> str:
        try:
            model = load(folder, comm, dtype)
        except CheckpointError as error:
            return str(error).removeprefix(f"checkpoint {folder} cannot be loaded: ")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return ""

    return run_simulated_ranks(tp, body)


def fault(rank: int, index: list[int], found: float, expected: float) -> str:
    return (
        f"tensor {HEAD} in model.safetensors differs from {EMBED}, to which config.json ties it, first in the rows of "
        f"rank {rank} at {index}: {found!r} and not {expected!r}; {WHAT_TO_CHANGE}"
    )


Change = Callable[[torch.Tensor], torch.Tensor | None]


@pytest.fixture
def with_head(own_tiny: Callable) -> Callable[..., Path]:
    """with_head(change): the folder of a tied model with a copy of its embedding, changed, as its head."""

    def make(change: Change = lambda head: None, stored: torch.dtype = torch.float32, **settings: Any) -> Path:
        folder: Path = own_tiny(**settings).folder
        content = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
        head = content[EMBED].clone()
        changed = change(head)
        save_file(content | {HEAD: head if changed is None else changed}, folder / "model.safetensors")
        return folder

    return make


def put(value: float, *places: tuple[int, int]) -> Change:
    def change(head: torch.Tensor) -> None:
        for place in places:
            head[place] = value

    return change


@pytest.mark.parametrize(("vocab_size", "tp"), [(259, 1), (259, 3), (9, 4)])
def test_a_copy_of_the_embedding_is_accepted_and_said(
    vocab_size: int, tp: int, with_head: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """259 rows leave padding on the last rank; of 9 rows the last two ranks of four have none."""
    folder = with_head(vocab_size=vocab_size)
    with caplog.at_level(logging.INFO, "paceline"):
        assert outcomes(folder, tp) == [""] * tp
    said = [record.getMessage() for record in caplog.records if HEAD in record.getMessage()]
    assert said == [f"{HEAD} is the embedding again, to which it is tied: not kept"]


def test_another_head_is_refused_by_the_ranks_whose_rows_differ(with_head: Callable) -> None:
    folder = with_head(put(9.0, (200, 5), (201, 0)))
    expected = load_file(folder / "model.safetensors")[EMBED][200, 5].item()
    assert outcomes(folder, 2) == ["", fault(1, [200, 5], 9.0, expected)]


def test_each_rank_names_the_first_of_its_rows(with_head: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which readers end with their pieces, of which each row is one."""
    read_rows = StoredBox.read_rows

    def the_first_takes_longest(self: StoredBox, start: int, memory: npt.NDArray[np.uint8]) -> None:
        read_rows(self, start, memory)
        if memory.view(np.float32)[3] == 9.0:
            threading.Event().wait(0.2)

    monkeypatch.setattr(tied_head, "PIECE_BYTES", 1)
    monkeypatch.setattr(StoredBox, "read_rows", the_first_takes_longest)
    monkeypatch.setattr("paceline.model.staging.num_readers", lambda ranks: 4)
    folder = with_head(put(9.0, (2, 3), (3, 4), (4, 5), (130, 3), (131, 7)))
    embedding = load_file(folder / "model.safetensors")[EMBED]
    assert outcomes(folder, 2) == [
        fault(0, [2, 3], 9.0, embedding[2, 3].item()),
        fault(1, [130, 3], 9.0, embedding[130, 3].item()),
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_one_that_differs(value: float, with_head: Callable) -> None:
    folder = with_head(put(value, (7, 7)))
    expected = load_file(folder / "model.safetensors")[EMBED][7, 7].item()
    assert outcomes(folder, 1) == [fault(0, [7, 7], value, expected)]


def test_they_are_compared_as_the_embedding_is_cast(with_head: Callable) -> None:
    """A head in float32 beside an embedding in bfloat16, with a difference that bfloat16 does not have."""

    def finer(head: torch.Tensor) -> torch.Tensor:
        head[4, 2] = 1.0
        wide = head.float()
        wide[4, 2] = 1.0 + 2**-12
        return wide

    folder = with_head(finer, stored=torch.bfloat16)
    content = load_file(folder / "model.safetensors")
    content[EMBED][4, 2] = 1.0
    save_file(content, folder / "model.safetensors")
    assert outcomes(folder, 1, torch.bfloat16) == [""]
    assert outcomes(folder, 1, torch.float32) == [fault(0, [4, 2], 1.0 + 2**-12, 1.0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda head: torch.zeros(5, 64), "has shape [5, 64], not [256, 64]"),
        (lambda head: head.to(torch.float8_e4m3fn), "has type F8_E4M3; only BF16, F16, F32 are supported"),
    ],
)
def test_its_form_is_checked_as_that_of_any_tensor(change: Change, message: str, with_head: Callable) -> None:
    assert outcomes(with_head(change), 2) == [f"tensor {HEAD} in model.safetensors {message}"] * 2


def test_an_untied_model_loads_both(with_head: Callable) -> None:
    """What the message says to change."""
    folder = with_head(put(9.0, (200, 5)))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    model = load(folder, SingleRank())
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(model.lm_head.weight, stored[HEAD])
    assert torch.equal(model.model.embed_tokens.weight, stored[EMBED])


def test_a_rank_reads_its_own_rows_once(with_head: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_head(vocab_size=259)
    read: list[int] = []
    read_rows = StoredBox.read_rows

    def counted(self: StoredBox, start: int, memory: npt.NDArray[np.uint8]) -> None:
        if HEAD in self._where:
            read.append(memory.nbytes)
        read_rows(self, start, memory)

    monkeypatch.setattr(StoredBox, "read_rows", counted)
    monkeypatch.setattr(tied_head, "PIECE_BYTES", 10 * 64 * 4)
    comm = SingleRank()
    comm.rank, comm.size = 2, 3  # loading calls no collective
    load(folder, comm)
    # 259 ids on three ranks are 88 each, and 83 on the last.
    assert sorted(read) == [3 * 64 * 4, *[10 * 64 * 4] * 8]


def test_a_file_that_ends_while_they_are_compared(with_head: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_head()
    run = TiedHeadCheck.run

    def cut_first(self: TiedHeadCheck) -> list[str]:
        os.truncate(folder / "model.safetensors", 5000)
        return run(self)

    monkeypatch.setattr(TiedHeadCheck, "run", cut_first)
    ends = f"tensor {HEAD} in model.safetensors cannot be read: the file ends before it"
    assert outcomes(folder, 1) == [f"{ends}; model.safetensors was cut while it was read"]


def test_a_difference_is_told_to_other_ranks(with_head: Callable) -> None:
    stop = threading.Event()
    with pytest.raises(CheckpointError, match=re.escape(WHAT_TO_CHANGE)):
        load(with_head(put(9.0, (1, 1))), SingleRank(), stop=stop)
    assert stop.is_set()


def test_another_ranks_fault_ends_the_comparison(with_head: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_head(put(9.0, (1, 1)))
    stop = threading.Event()
    run = TiedHeadCheck.run

    def after_the_fault(self: TiedHeadCheck) -> list[str]:
        stop.set()
        return run(self)

    monkeypatch.setattr(TiedHeadCheck, "run", after_the_fault)
    with pytest.raises(LoadingStopped):
        load(folder, SingleRank(), stop=stop)


def test_verify_compares_them_without_the_loader(with_head: Callable) -> None:
    folder = with_head()
    model = load(folder, SingleRank())
    with CheckpointTensors(folder) as tensors:
        assert verify_tied_head(model, torch.float32, tensors) == []
    content = load_file(folder / "model.safetensors")
    content[HEAD][3, 4] = 9.0
    save_file(content, folder / "model.safetensors")
    with CheckpointTensors(folder) as tensors:
        found = verify_tied_head(model, torch.float32, tensors)
    expected = content[EMBED][3, 4].item()
    assert found == [Difference("tied", HEAD, 0, (3, 4), 9.0, expected)]
    text = f"{HEAD} of the checkpoint has 9.0 at [3, 4], and the embedding to which config.json ties it {expected!r}"
    assert str(found[0]) == text


@pytest.mark.parametrize("settings", [{"tie_word_embeddings": False}, {"tie_word_embeddings": True}])
def test_verify_has_nothing_to_compare_without_a_tied_head_in_the_files(
    settings: dict[str, bool], own_tiny: Callable
) -> None:
    folder = own_tiny(**settings).folder
    with CheckpointTensors(folder) as tensors:
        assert verify_tied_head(load(folder, SingleRank()), torch.float32, tensors) is None
