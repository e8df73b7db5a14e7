"""Which products are timed, and how errors are judged."""

from __future__ import annotations

import math
from pathlib import Path

import gemm
import gpu_timing
import models
import pytest
import torch

from paceline.kernels.stream_cut import BUCKETS, Cut, cut_product, num_tiles
from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.linear import GatedColumnParallelLinear
from paceline.model.registry import MODEL_CLASSES
from paceline.worker.product_tuning import Layer

NUM_VARIANTS = {
    "llama3.2-1b": {1: 13, 2: 14, 4: 17, 8: 17},
    "qwen3-0.6b": {1: 19, 2: 19, 4: 15, 8: 14},
    "qwen3-8b": {1: 15, 2: 15, 4: 14, 8: 14},
    "qwen3-32b": {1: 15, 2: 15, 4: 10, 8: 14},
}
"""Of the streamed product's kernel, by model and number of ranks."""


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_the_products_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    """Every weight matrix of a model of this config is one of the products, and the reverse."""
    models.write_folder(name, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    with torch.device("meta"):
        model = MODEL_CLASSES[config.architecture](config, SingleRank(), torch.bfloat16, 16)
    matrices = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2}
    assert set(models.products(name).values()) == matrices


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_few_variants_stream_all_products_of_a_model(name: str, num_ranks: int, tmp_path: Path) -> None:
    """On an H200, the products of every rank can be streamed, and those that differ in size alone share kernels."""
    models.write_folder(name, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    comm = SingleRank()
    comm.size = num_ranks
    with torch.device("meta"):
        model = MODEL_CLASSES[config.architecture](config, comm, torch.bfloat16, 16)
    variants: set[tuple[Cut, bool]] = set()
    for layer in (layer for layer in model.modules() if isinstance(layer, Layer)):
        gated = isinstance(layer, GatedColumnParallelLinear)
        rows, size = layer.weight.shape
        columns = rows // 2 if gated else rows
        for bucket in BUCKETS:
            cut = cut_product(columns, size, bucket, gated=gated, processors=132, shared_bytes=227 << 10)
            assert cut is not None
            assert cut.shared_bytes <= 227 << 10
            assert cut.pieces == 1 or num_tiles(columns, gated) * cut.pieces <= 132
            variants.add((cut, gated))
    assert len(variants) == NUM_VARIANTS[name][num_ranks]


def test_a_shape_of_two_models_is_timed_once() -> None:
    shapes = gemm.shapes(["qwen3-0.6b", "qwen3-8b", "qwen3-0.6b"])
    assert len(shapes) == len(set(shapes)) == 10
    assert [shape for shape in shapes if shape.gated] == [(6144, 1024, True), (24576, 4096, True)]


def test_each_way_of_a_gated_product_has_its_activation() -> None:
    x, weight = torch.randn(5, 16), torch.randn(24, 16)
    expected = gemm.activated(x @ weight.t(), gated=True)
    assert expected.shape == (5, 12)
    ways = gemm.kernels(5, gated=True, stream=None)
    assert list(ways) == ["cuBLAS", "skinny"]
    assert list(gemm.kernels(9, gated=True, stream=None)) == ["cuBLAS"]
    torch.testing.assert_close(ways["cuBLAS"](x, weight), expected)


def test_a_wrong_or_undefined_result_is_not_timed() -> None:
    expected = torch.randn(8, 8)
    gpu_timing.check_error("rounded", gpu_timing.relative_error(expected.bfloat16(), expected), gemm.MAX_ERROR)
    for wrong in (expected.flip(0), torch.full((8, 8), math.nan)):
        with pytest.raises(RuntimeError, match="the product is wrong"):
            gpu_timing.check_error("the product", gpu_timing.relative_error(wrong, expected), gemm.MAX_ERROR)
