"""Which kernel a product takes: the fastest measured, measured once, whatever becomes of the folder it is kept in."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.kernels.tiled_linear import Tile, candidate_tiles
from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.linear import GatedColumnParallelLinear, RowParallelLinear
from paceline.model.weights import load_model
from paceline.worker import product_tuning
from paceline.worker.product_tuning import BUCKETS, Layer, ProductTuner
from paceline.worker.tuning_cache import TuningCache

NONE: dict[int, Tile] = {}


@pytest.fixture
def model(tiny: Callable[..., Any]) -> CausalLM:
    folder = tiny("qwen3").folder
    config = ModelConfig.from_folder(folder)
    device = torch.device("cpu")
    return load_model(folder, config, SingleRank(), device, torch.bfloat16, max_model_len=64)


class Stopwatch:
    """Seconds by the tile that the layers have at the time: all are slower than the library, but for fast ones."""

    def __init__(self, model: CausalLM, fast: dict[int, Tile], gain: float = 0.5) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
        self._fast = fast
        self._gain = gain
        self.calls = 0

    def __call__(self, launches: Callable[[], None]) -> float:
        launches()
        self.calls += 1
        tiles = [layer.tiles for layer in self._layers]
        if not any(tiles):
            return 1.0
        return self._gain if self._fast in tiles else 2.0


def tune(model: CausalLM, folder: Path, seconds: Callable[[Callable[[], None]], float]) -> None:
    tuner = ProductTuner(model, TuningCache(folder))
    tuner.measure(seconds)
    tuner.apply()


def tiles_of_gated(model: CausalLM) -> list[dict[int, Tile]]:
    return [dict(layer.tiles) for layer in model.modules() if isinstance(layer, GatedColumnParallelLinear)]


def test_the_fastest_is_taken_by_all_layers_of_a_kind(model: CausalLM, tmp_path: Path) -> None:
    fast = {64: candidate_tiles(64)[1]}
    tune(model, tmp_path, Stopwatch(model, fast))
    layers = tiles_of_gated(model)
    assert len(layers) == 2
    assert all(tiles == fast for tiles in layers)


def test_a_hundredth_is_no_gain(model: CausalLM, tmp_path: Path) -> None:
    tune(model, tmp_path, Stopwatch(model, {64: candidate_tiles(64)[1]}, gain=0.99))
    assert tiles_of_gated(model) == [{}, {}]


def test_a_tile_that_the_gpu_cannot_hold_is_not_tried(
    model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gated product holds the tiles of two weights."""
    tile = candidate_tiles(128)[2]
    assert tile.shared_bytes(gated=False) == 4 * 64 * (128 + 128) * 2
    monkeypatch.setattr(product_tuning, "shared_memory", lambda _: tile.shared_bytes(gated=True) - 1)
    tune(model, tmp_path, Stopwatch(model, {128: tile}))
    assert tiles_of_gated(model) == [{}, {}]
    others = [dict(layer.tiles) for layer in model.modules() if isinstance(layer, RowParallelLinear)]
    assert others == [{128: tile}] * 4


def test_it_is_measured_once(model: CausalLM, tmp_path: Path) -> None:
    fast = {32: candidate_tiles(32)[0]}
    tune(model, tmp_path, Stopwatch(model, fast))
    again = Stopwatch(model, NONE)
    tune(model, tmp_path, again)
    assert again.calls == 0
    assert tiles_of_gated(model) == [fast] * 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"16": 5}', b'{"16": {"rows": 16}}', b'{"x": null}', b"\xff\xfe", None],
    ids=["empty", "cut", "list", "number", "half a tile", "no bucket", "no text", "unknown tile"],
)
def test_what_cannot_be_used_is_measured_again(
    content: bytes | None, model: CausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tune(model, tmp_path, Stopwatch(model, NONE))
    files = sorted(tmp_path.iterdir())
    unknown = dict.fromkeys(BUCKETS) | {16: {"rows": 16, "columns": 999, "inner": 1, "stages": 1, "warps": 1}}
    for file in files:
        file.write_bytes(json.dumps(unknown).encode() if content is None else content)
    fast = {128: candidate_tiles(128)[2]}
    tune(model, tmp_path, Stopwatch(model, fast))
    assert tiles_of_gated(model) == [fast] * 2
    assert len([record for record in caplog.records if "measured again" in record.message]) == len(files)
    tune(model, tmp_path, Stopwatch(model, NONE))
    assert tiles_of_gated(model) == [fast] * 2


def test_a_bucket_that_was_not_measured_is(model: CausalLM, tmp_path: Path) -> None:
    tune(model, tmp_path, Stopwatch(model, NONE))
    for file in tmp_path.iterdir():
        file.write_text(json.dumps({"16": None}))
    fast = {256: candidate_tiles(256)[0]}
    tune(model, tmp_path, Stopwatch(model, fast))
    assert tiles_of_gated(model) == [fast] * 2


def test_a_folder_that_cannot_be_made_costs_the_measurement_alone(
    model: CausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    fast = {16: candidate_tiles(16)[0]}
    with caplog.at_level(logging.INFO):
        tune(model, blocked / "tiles", Stopwatch(model, fast))
    assert tiles_of_gated(model) == [fast] * 2
    assert len([record for record in caplog.records if "every start measures" in record.message]) == 1


def test_two_writers_leave_one_whole_file(tmp_path: Path) -> None:
    """Whoever reads between two writers' steps finds the one's choice or the other's."""
    first, second = TuningCache(tmp_path), TuningCache(tmp_path)
    tile = candidate_tiles(16)[0]
    for number in range(20):
        first.write("plain-8x8-bfloat16", {16: tile})
        second.write("plain-8x8-bfloat16", {16: None})
        assert TuningCache(tmp_path).read("plain-8x8-bfloat16") == {16: None}, number
    assert os.listdir(tmp_path) == ["plain-8x8-bfloat16.json"]
