"""Which products are timed, and how errors are judged."""

from __future__ import annotations

import math
from pathlib import Path

import gemm
import gpu_timing
import models
import pytest
import torch

from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.registry import MODEL_CLASSES


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_the_products_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    """Every weight matrix of a model of this config is one of the products, and the reverse."""
    models.write_folder(name, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    with torch.device("meta"):
        model = MODEL_CLASSES[config.architecture](config, SingleRank(), torch.bfloat16, 16)
    matrices = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2}
    assert set(models.products(name).values()) == matrices


def test_a_shape_of_two_models_is_timed_once() -> None:
    shapes = gemm.shapes(["qwen3-0.6b", "qwen3-8b", "qwen3-0.6b"])
    assert len(shapes) == len(set(shapes)) == 10


def test_a_wrong_or_undefined_result_is_not_timed() -> None:
    expected = torch.randn(8, 8)
    gpu_timing.check_error("rounded", gpu_timing.relative_error(expected.bfloat16(), expected), gemm.MAX_ERROR)
    for wrong in (expected.flip(0), torch.full((8, 8), math.nan)):
        with pytest.raises(RuntimeError, match="the product is wrong"):
            gpu_timing.check_error("the product", gpu_timing.relative_error(wrong, expected), gemm.MAX_ERROR)
