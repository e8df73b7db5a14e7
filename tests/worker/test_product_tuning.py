"""Whether a product is streamed: the faster way, measured once, whatever becomes of the folder it is kept in."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.kernels
from paceline.kernels.stream_cut import BUCKETS, Cut, cut_product
from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.embedding import ParallelLMHead
from paceline.model.linear import GatedColumnParallelLinear, RowParallelLinear
from paceline.model.staging import StagingMemory
from paceline.model.weights import load_model
from paceline.worker import product_tuning
from paceline.worker.product_tuning import Layer, ProductTuner
from paceline.worker.tuning_cache import TuningCache


@pytest.fixture
def model(tiny: Callable[..., Any]) -> CausalLM:
    folder = tiny("qwen3").folder
    config = ModelConfig.from_folder(folder)
    with StagingMemory(torch.device("cpu"), 1) as staging:
        return load_model(folder, config, SingleRank(), staging, torch.bfloat16, max_model_len=64)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products can be streamed as on an H200."""

    def cuts(weight: torch.Tensor, *, gated: bool) -> dict[int, Cut]:
        num_columns = weight.shape[0] // 2 if gated else weight.shape[0]
        gpu = {"processors": 132, "shared_bytes": 227 << 10}
        found = {rows: cut_product(num_columns, weight.shape[1], rows, gated=gated, **gpu) for rows in BUCKETS}
        return {rows: cut for rows, cut in found.items() if cut is not None}

    monkeypatch.setattr(product_tuning, "cuts_of", cuts)


class Stopwatch:
    """A second for each layer: more if it is streamed in other than the fast buckets, and less in those."""

    def __init__(self, model: CausalLM, *fast: int, gain: float = 0.5, kind: type[Layer] | None = None) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
        self._fast = fast
        self._gain = gain
        self._kind = kind
        self.calls = 0

    def __call__(self, launches: Callable[[], None]) -> float:
        launches()
        self.calls += 1
        return sum(self._seconds(layer) for layer in self._layers)

    def _seconds(self, layer: Layer) -> float:
        if not layer.streams:
            return 1.0
        fast = set(layer.streams) <= set(self._fast) and (self._kind is None or isinstance(layer, self._kind))
        return self._gain if fast else 2.0


def tune(model: CausalLM, folder: Path, seconds: Callable[[Callable[[], None]], float]) -> None:
    tuner = ProductTuner(model, TuningCache(folder))
    tuner.measure(seconds)
    tuner.apply()


def streamed(model: CausalLM, kind: type[Layer] = GatedColumnParallelLinear) -> list[list[int]]:
    """The buckets of rows in which each layer of a kind is streamed."""
    return [list(layer.streams) for layer in model.modules() if isinstance(layer, kind)]


def test_the_faster_way_is_taken_by_all_layers_of_a_kind(model: CausalLM, tmp_path: Path) -> None:
    tune(model, tmp_path, Stopwatch(model, 8, 64))
    assert streamed(model) == [[8, 64]] * 2
    assert streamed(model, RowParallelLinear) == [[8, 64]] * 4
    streams = [layer.streams[64] for layer in model.modules() if isinstance(layer, Layer)]
    assert {stream.cut for stream in streams} == {Cut(64, 128, 6, 8)}
    assert len({id(stream.exchange) for stream in streams}) == 1
    assert (streams[0].exchange == -1).all()


def test_of_the_products_of_a_layer_some_may_be_streamed(model: CausalLM, tmp_path: Path) -> None:
    tune(model, tmp_path, Stopwatch(model, 16, kind=RowParallelLinear))
    assert streamed(model, RowParallelLinear) == [[16]] * 4
    assert streamed(model) == [[]] * 2
    tune(model, tmp_path / "other", Stopwatch(model, 16, kind=GatedColumnParallelLinear))
    assert streamed(model, RowParallelLinear) == [[]] * 4
    assert streamed(model) == [[16]] * 2


def test_what_products_gain_together_is_seen(model: CausalLM, tmp_path: Path) -> None:
    """Each is slower by itself when it is streamed."""
    layers = [layer for layer in model.modules() if isinstance(layer, Layer)]

    def seconds(launches: Callable[[], None]) -> float:
        launches()
        count = sum(layer.streams.keys() == {32} for layer in layers)
        return 0.9 if count == 8 else 1 + count / 10

    tune(model, tmp_path, seconds)
    assert streamed(model) == [[32]] * 2
    assert streamed(model, RowParallelLinear) == [[32]] * 4
    assert streamed(model, ParallelLMHead) == [[]]


def test_what_is_no_faster_is_not_streamed(model: CausalLM, tmp_path: Path) -> None:
    tune(model, tmp_path, Stopwatch(model, 64, gain=1.0))
    assert streamed(model) == [[]] * 2


def test_where_nothing_can_be_streamed_nothing_is_measured(
    model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuts_of says the truth: this is no Hopper GPU."""
    monkeypatch.undo()
    stopwatch = Stopwatch(model, 64)
    tune(model, tmp_path, stopwatch)
    assert stopwatch.calls == 0
    assert streamed(model) == [[], []]
    assert os.listdir(tmp_path) == []


def test_with_bias_gate_and_up_are_a_plain_product(model: CausalLM, tmp_path: Path) -> None:
    for layer in model.modules():
        if isinstance(layer, GatedColumnParallelLinear):
            layer.bias = torch.nn.Parameter(torch.zeros_like(layer.weight[:, 0]))
    tune(model, tmp_path, Stopwatch(model, *BUCKETS))
    assert streamed(model) == [list(BUCKETS)] * 2


def test_it_is_measured_once(model: CausalLM, tmp_path: Path) -> None:
    tune(model, tmp_path, Stopwatch(model, 32))
    again = Stopwatch(model)
    tune(model, tmp_path, again)
    assert again.calls == 0
    assert streamed(model) == [[32]] * 2


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b'{"16": 5}', b'{"16": null}', b'{"16": true}', b'{"16": [1, 0, 1, 0]}'),
        *(b'{"16": [true, true]}', b'{"x": [true, true, true, true]}', b"\xff\xfe"),
    ],
    ids=["empty", "cut", "list", "number", "null", "flag", "numbers", "too few", "no bucket", "no text"],
)
def test_what_cannot_be_used_is_measured_again(
    content: bytes, model: CausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tune(model, tmp_path, Stopwatch(model))
    files = sorted(tmp_path.iterdir())
    for file in files:
        file.write_bytes(content)
    tune(model, tmp_path, Stopwatch(model, 128))
    assert streamed(model) == [[128]] * 2
    assert len([record for record in caplog.records if "measured again" in record.message]) == len(files)
    tune(model, tmp_path, Stopwatch(model))
    assert streamed(model) == [[128]] * 2


def test_a_bucket_that_was_not_measured_is(model: CausalLM, tmp_path: Path) -> None:
    tune(model, tmp_path, Stopwatch(model))
    for file in tmp_path.iterdir():
        file.write_text(json.dumps({"16": json.loads(file.read_text())["16"]}))
    tune(model, tmp_path, Stopwatch(model, 128))
    assert streamed(model) == [[128]] * 2


def test_a_folder_that_cannot_be_made_costs_the_measurement_alone(
    model: CausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.INFO):
        tune(model, blocked / "products", Stopwatch(model, 16))
    assert streamed(model) == [[16]] * 2
    assert len([record for record in caplog.records if "every start measures" in record.message]) == 1


def test_two_writers_leave_one_whole_file(tmp_path: Path) -> None:
    """Whoever reads between two writers' steps finds the one's choice or the other's."""
    first, second = TuningCache(tmp_path), TuningCache(tmp_path)
    for number in range(20):
        first.write("norm-8x8-bfloat16", {16: (True,)})
        second.write("norm-8x8-bfloat16", {16: (False,)})
        assert TuningCache(tmp_path).read("norm-8x8-bfloat16", 1) == {16: (False,)}, number
    assert os.listdir(tmp_path) == ["norm-8x8-bfloat16.json"]


@pytest.mark.parametrize("name", ["streamed_kernel", "skinny_linear", "tiled_kernel", "tiled_linear", "silu_and_mul"])
def test_what_was_measured_of_other_kernels_is_not_taken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    sources = shutil.copytree(next(iter(paceline.kernels.__path__)), tmp_path / "kernels")
    TuningCache.of(torch.device("cuda")).write("norm-8x8-bfloat16", {16: (True,)})
    monkeypatch.setattr(paceline.kernels, "__path__", [str(sources)])
    assert TuningCache.of(torch.device("cuda")).read("norm-8x8-bfloat16", 1) == {16: (True,)}
    with (sources / f"{name}.py").open("a") as source:
        source.write("\n")
    assert TuningCache.of(torch.device("cuda")).read("norm-8x8-bfloat16", 1) == {}
