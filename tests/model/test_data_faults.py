"""Faults that only the elements show, and elements not written once: found, named, and told to other ranks."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.model import finite_values, shard_reader, staging, weights
from paceline.model.checkpoint_files import StoredBox
from paceline.model.communicator import Communicator, SingleRank, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.coverage import Coverage
from paceline.model.decoder import CausalLM
from paceline.model.errors import CheckpointError, LoadingStopped
from paceline.model.ledger import get_parameter
from paceline.model.parameter import Copy, LoadedTensor, ShardedParameter, ShardId, shard_copies
from paceline.model.safetensors_header import read_header

CPU = torch.device("cpu")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
NORM = "model.norm.weight"


def load(
    folder: Path, comm: Communicator | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> CausalLM:
    config = ModelConfig.from_folder(folder)
    comm = comm or SingleRank()
    with staging.StagingMemory(CPU, comm.size) as memory:
        return weights.load_model(folder, config, comm, memory, dtype, max_model_len=64, **options)


def change(folder: Path, name: str, place: tuple[int, ...], value: float) -> None:
    content = load_file(folder / "model.safetensors")
    content[name][place] = value
    save_file(content, folder / "model.safetensors")


def outcome_by_rank(folder: Path, tp: int) -> list[str]:
    """What loading says on each rank; empty where it succeeds."""

    def body(comm: Communicator) -> str:
        try:
            load(folder, comm)
        except CheckpointError as error:
            return str(error)
        return ""

    return run_simulated_ranks(tp, body)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_found_by_the_rank_that_reads_it(value: float, own_tiny: Callable) -> None:
    folder = own_tiny().folder
    change(folder, Q_PROJ, (40, 3), value)
    first, second = outcome_by_rank(folder, 2)
    assert first == ""
    assert f"tensor {Q_PROJ} in model.safetensors holds {value:g} at [40, 3]" in second


def test_the_place_is_that_in_the_full_tensor_for_columns_and_vectors_too(own_tiny: Callable) -> None:
    folder = own_tiny().folder
    change(folder, O_PROJ, (7, 50), float("nan"))
    change(folder, NORM, (9,), float("nan"))
    first, second = outcome_by_rank(folder, 2)
    assert O_PROJ not in first
    assert f"tensor {O_PROJ} in model.safetensors holds nan at [7, 50]" in second
    for message in (first, second):
        assert f"tensor {NORM} in model.safetensors holds nan at [9]" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), torch.finfo(torch.bfloat16).min])
def test_the_one_answer_for_many_tensors(value: float, dtype: torch.dtype) -> None:
    """Which only a GPU is asked for."""
    tensors = [torch.full((size,), -1.0, dtype=dtype) for size in (1, 7, 100)]
    assert finite_values._are_finite(tensors)
    tensors[1][4] = value
    assert finite_values._are_finite(tensors) == bool(tensors[1].isfinite().all())


def test_getting_ready_runs_what_a_look_at_many_tensors_runs() -> None:
    """As torch's operations; test_gpu_loading.py has the kernels."""

    def operations(run: Callable[[], object]) -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run()
        return {average.key for average in profile.key_averages()}

    tensors = [torch.zeros(size, dtype=torch.bfloat16) for size in (7, 100, 3)]
    ready = operations(lambda: finite_values.get_ready(CPU, torch.bfloat16))
    look = operations(lambda: finite_values._are_finite(tensors))
    assert ready - {"aten::zeros", "aten::empty", "aten::zero_"} == look


def test_a_value_that_only_the_cast_makes_infinite(own_tiny: Callable) -> None:
    folder = own_tiny().folder
    largest = torch.finfo(torch.float32).max  # rounds up to infinity in bfloat16
    change(folder, Q_PROJ, (0, 1), largest)
    load(folder)
    with pytest.raises(CheckpointError, match=re.escape("holds 3.40282e+38 at [0, 1], beyond bfloat16")):
        load(folder, dtype=torch.bfloat16)


def meddle(monkeypatch: pytest.MonkeyPatch, parameter_name: str, loader: Callable) -> None:
    """Give one parameter of every model another weight_loader."""
    materialise = weights._materialise

    def with_loader(model: CausalLM, device: torch.device) -> None:
        materialise(model, device)
        get_parameter(model, parameter_name).weight_loader = loader

    monkeypatch.setattr(weights, "_materialise", with_loader)


def cut_after_headers(path: Path, size: int) -> Callable[..., Iterator[Copy]]:
    def loader(parameter: ShardedParameter, loaded: LoadedTensor, shard_id: ShardId) -> Iterator[Copy]:
        os.truncate(path, size)
        return shard_copies(parameter, loaded, shard_id)

    return loader


def test_a_file_that_ends_while_it_is_read(own_tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_tiny().folder
    path = folder / "model.safetensors"
    meddle(monkeypatch, NORM, cut_after_headers(path, path.stat().st_size - 100))
    with pytest.raises(CheckpointError, match=r"in model\.safetensors cannot be read: the file ends before it"):
        load(folder)


def test_a_file_that_ends_while_columns_are_read(own_tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_tiny().folder
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        (entry,) = [entry for entry in read_header(file) if entry.name == O_PROJ]
    meddle(monkeypatch, NORM, cut_after_headers(path, entry.end - 1))
    comm = SingleRank()
    comm.rank, comm.size = 1, 2  # loading calls no collective
    with pytest.raises(CheckpointError, match=r"model\.safetensors was cut while it was read"):
        load(folder, comm)


def test_all_tensors_with_bad_values_are_reported_together(own_tiny: Callable) -> None:
    folder = own_tiny().folder
    for name, place in ((Q_PROJ, (1, 2)), (O_PROJ, (3, 4)), (NORM, (5,))):
        change(folder, name, place, float("nan"))
    with pytest.raises(CheckpointError) as error:
        load(folder)
    for name in (Q_PROJ, O_PROJ, NORM):
        assert f"tensor {name} in model.safetensors holds nan" in str(error.value)


def test_a_fault_sets_the_flag_for_other_ranks(own_tiny: Callable) -> None:
    folder = own_tiny().folder
    stop = threading.Event()
    load(folder, stop=stop)
    assert not stop.is_set()
    change(folder, Q_PROJ, (1, 2), float("nan"))
    with pytest.raises(CheckpointError):
        load(folder, stop=stop)
    assert stop.is_set()


def test_a_rank_without_faults_stops_at_the_flag(own_tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_reader, "FAULT_GRACE_S", 0.0)
    stop = threading.Event()
    stop.set()
    with pytest.raises(LoadingStopped):
        load(own_tiny().folder, stop=stop)


class FlagAfter:
    """A flag that another rank sets once it was asked so many times."""

    def __init__(self, questions: int) -> None:
        self._left = questions

    def set(self) -> None:
        self._left = 0

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_what_was_read_before_the_flag_is_looked_at_though_it_is_not_a_whole_tensor(
    own_tiny: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_tiny().folder
    first = first_tensor_of(folder)
    change(folder, first, (0, 0), float("nan"))
    monkeypatch.setattr(staging, "READERS", 1)
    monkeypatch.setattr(shard_reader, "PIECE_BYTES", 1)  # a row
    monkeypatch.setattr(shard_reader, "FAULT_GRACE_S", 0.0)
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {first} in model.safetensors holds nan at [0, 0]")):
        load(folder, stop=FlagAfter(3))


def first_tensor_of(folder: Path) -> str:
    """The one that is read first."""
    with (folder / "model.safetensors").open("rb") as file:
        return min(read_header(file), key=lambda entry: entry.begin).name


def test_a_long_load_looks_at_values_before_its_end(own_tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_tiny().folder
    name = first_tensor_of(folder)
    change(folder, name, (0, 0), float("nan"))
    stop = threading.Event()
    starts: list[int] = []
    read_rows = StoredBox.read_rows

    def as_if_slow(self: StoredBox, start: int, memory: npt.NDArray[np.uint8]) -> None:
        """The only reader reads its second piece once it has been told to stop."""
        if threading.current_thread().name.startswith("read-weights"):
            if starts:
                assert stop.wait(60)
            starts.append(start)
        read_rows(self, start, memory)

    monkeypatch.setattr(StoredBox, "read_rows", as_if_slow)
    monkeypatch.setattr(staging, "READERS", 1)
    monkeypatch.setattr(shard_reader, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(shard_reader, "PIECE_BYTES", 1)  # a row
    monkeypatch.setattr(shard_reader, "FAULT_GRACE_S", -1.0)
    with pytest.raises(CheckpointError, match=f"tensor {name} in model.safetensors holds nan"):
        load(folder, stop=stop)
    assert starts == [0, 1]


@pytest.fixture
def memory_holds_nan() -> Iterator[None]:
    """Memory that nobody has written is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_holds_nan")
def test_what_was_not_read_before_the_flag_is_not_looked_at(
    own_tiny: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "READERS", 1)
    monkeypatch.setattr(shard_reader, "PIECE_BYTES", 1)  # a row
    monkeypatch.setattr(shard_reader, "FAULT_GRACE_S", 0.0)
    with pytest.raises(LoadingStopped):
        load(own_tiny().folder, stop=FlagAfter(3))


@pytest.mark.usefixtures("memory_holds_nan")
def test_padding_is_zero_whatever_the_memory_held(own_tiny: Callable) -> None:
    folder = own_tiny(tie_word_embeddings=False, vocab_size=263).folder

    def body(comm: Communicator) -> int:
        padding = 0
        for name, parameter in load(folder, comm).named_parameters():
            assert isinstance(parameter, ShardedParameter)
            assert parameter.isfinite().all(), name
            for shard in parameter.shards.values():
                assert not parameter[shard.padding].any(), name
                padding += parameter[shard.padding].numel()
        return padding

    assert run_simulated_ranks(3, body)[2] > 0


def test_a_tensor_is_looked_at_in_parts_where_it_is_large(own_tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_tiny().folder
    change(folder, Q_PROJ, (17, 5), float("nan"))
    change(folder, Q_PROJ, (40, 3), float("inf"))
    monkeypatch.setattr(finite_values, "_CHECKED_BYTES", 16 * 64 * 4)  # sixteen rows
    monkeypatch.setattr(finite_values, "PIECE_BYTES", 64 * 4)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value).endswith(f"tensor {Q_PROJ} in model.safetensors holds nan at [17, 5]")


def twice(parameter: ShardedParameter, loaded: LoadedTensor, shard_id: ShardId) -> Iterator[Copy]:
    for copy in shard_copies(parameter, loaded, shard_id):
        yield copy
        yield copy


def without_last_row(parameter: ShardedParameter, loaded: LoadedTensor, shard_id: ShardId) -> Iterator[Copy]:
    for copy in shard_copies(parameter, loaded, shard_id):
        *pieces, _ = copy.pieces(1)
        yield from pieces


def one_row_down(parameter: ShardedParameter, loaded: LoadedTensor, shard_id: ShardId) -> Iterator[Copy]:
    """Everything a row below its place where there is room, so that the last row lies in the padding."""
    for copy in shard_copies(parameter, loaded, shard_id):
        rows, columns = copy.target
        if rows.stop == len(parameter):
            yield copy
            continue
        yield Copy(loaded, copy.source, parameter, (slice(rows.start + 1, rows.stop + 1), columns))


def a_row_twice_and_another_never(
    parameter: ShardedParameter, loaded: LoadedTensor, shard_id: ShardId
) -> Iterator[Copy]:
    for copy in shard_copies(parameter, loaded, shard_id):
        first, *others, _ = copy.pieces(1)
        yield from (first, first, *others)


def last_row_first(parameter: ShardedParameter, loaded: LoadedTensor, shard_id: ShardId) -> Iterator[Copy]:
    for copy in shard_copies(parameter, loaded, shard_id):
        yield from reversed(list(copy.pieces(1)))


def nothing(parameter: ShardedParameter, loaded: LoadedTensor, shard_id: ShardId) -> Iterator[Copy]:
    return iter(())


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (twice, "parameter lm_head.weight was written twice, at [0:127, 0:64] and [0:127, 0:64]"),
        (without_last_row, "parameter lm_head.weight of shape [136, 64] got 8064 of the 8128 elements it needs"),
        (
            a_row_twice_and_another_never,
            "parameter lm_head.weight was written twice, at [0:1, 0:64] and [0:1, 0:64]",
        ),
        (one_row_down, "parameter lm_head.weight was written outside its shards, at [1:128, 0:64]"),
        (nothing, "parameter lm_head.weight of shape [136, 64] got 0 of the 8128 elements it needs"),
    ],
)
def test_each_element_must_be_written_once(
    loader: Callable, message: str, own_tiny: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_tiny(tie_word_embeddings=False, vocab_size=263).folder
    meddle(monkeypatch, "lm_head.weight", loader)
    assert message in outcome_by_rank(folder, 2)[1]


def test_elements_may_be_written_in_any_order(own_tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_tiny(tie_word_embeddings=False, vocab_size=263).folder
    expected = load(folder).lm_head.weight
    meddle(monkeypatch, "lm_head.weight", last_row_first)
    assert torch.equal(load(folder).lm_head.weight, expected)


def test_a_parameter_that_no_tensor_stands_for_is_not_passed_over(own_tiny: Callable) -> None:
    """Field report B01: what nothing filled stops the start."""
    model = load(own_tiny().folder)
    assert f"parameter {NORM} of shape [64] got 0 of the 64 elements it needs" in Coverage(model).faults()
