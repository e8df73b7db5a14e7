"""Shards put together again are the full tensors, padding is zero, and a rank reads only its own slices."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from paceline.model.communicator import Communicator, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.dummy_tensors import DummyTensor
from paceline.model.errors import CheckpointError
from paceline.model.ledger import get_parameter, tensor_targets
from paceline.model.parameter import Box, ShardedParameter, stack_shards
from paceline.model.shard_plan import Span
from paceline.model.staging import StagingMemory
from paceline.model.weights import load_model

CPU = torch.device("cpu")
NO_BUFFER = torch.empty(0, dtype=torch.uint8)
ODD = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3, "vocab_size": 259}


def whole_box(shape: tuple[int, ...]) -> Box:
    return tuple(slice(0, size) for size in shape)


def load_all(folder: object, config: ModelConfig, tp: int, load_format: str) -> list[CausalLM]:
    def body(comm: Communicator) -> CausalLM:
        with StagingMemory(CPU, tp) as staging:
            dtype = torch.float32
            return load_model(str(folder), config, comm, staging, dtype, max_model_len=64, load_format=load_format)

    return run_simulated_ranks(tp, body)


def reassemble(models: list[CausalLM]) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint that the ranks' shards make; a part held by several ranks must agree on them."""
    whole: dict[str, torch.Tensor] = {}
    for name, (parameter_name, shard_id) in tensor_targets(models[0]).items():
        if shard_id not in get_parameter(models[0], parameter_name).shards:
            continue
        for model in models:
            parameter = get_parameter(model, parameter_name)
            shard = parameter.shards[shard_id]
            full = whole.setdefault(name, torch.full(shard.full_shape, torch.nan))
            there, here = full[shard.source()], parameter.data[shard.target]
            assert torch.equal(there.where(~there.isnan(), here), here)
            there.copy_(here)
            assert not parameter.data[shard.padding].any()
    return whole


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_shards_put_together_are_the_checkpoint_bit_for_bit(family: str, tp: int, tiny: Callable) -> None:
    folder = tiny(family, tie_word_embeddings=False, **ODD).folder
    whole = reassemble(load_all(folder, ModelConfig.from_folder(folder), tp, "safetensors"))
    stored = load_file(folder / "model.safetensors")
    assert whole.keys() == stored.keys()
    assert all(torch.equal(whole[name], stored[name]) for name in stored)


@pytest.mark.parametrize("tp", [2, 3])
def test_a_tied_head_is_the_embedding_shard_of_its_rank(tp: int, tiny: Callable) -> None:
    """Field report B01."""
    folder = tiny("llama", vocab_size=259).folder
    for model in load_all(folder, ModelConfig.from_folder(folder), tp, "safetensors"):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.weight.any()


@pytest.mark.parametrize("tp", [2, 3, 7])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_dummy_weights_are_the_same_model_at_any_number_of_ranks(family: str, tp: int, tiny: Callable) -> None:
    config = ModelConfig.from_folder(tiny(family, tie_word_embeddings=False, **ODD).folder)
    alone = reassemble(load_all("no-such-folder", config, 1, "dummy"))
    together = reassemble(load_all("no-such-folder", config, tp, "dummy"))
    assert alone.keys() == together.keys()
    assert all(torch.equal(alone[name], together[name]) for name in alone)


def test_dummy_weights_have_the_spread_of_trained_ones() -> None:
    tensor = DummyTensor("model.layers.0.mlp.up_proj.weight", (512, 256), torch.float32, CPU)
    matrix = tensor.read(whole_box(tensor.shape), NO_BUFFER)
    assert matrix.std().item() == pytest.approx(1 / 16, rel=0.02)
    assert matrix.mean().item() == pytest.approx(0, abs=1e-3)
    # Neighbours in a row or a column have nothing to do with one another: 4 standard errors of the correlation.
    for first, second in ((matrix[1:], matrix[:-1]), (matrix[:, 1:], matrix[:, :-1])):
        correlation = torch.corrcoef(torch.stack((first.flatten(), second.flatten())))[0, 1]
        assert abs(correlation.item()) < 4 / matrix.numel() ** 0.5
    assert matrix.unique().numel() > 0.98 * matrix.numel()
    norm = DummyTensor("model.norm.weight", (4096,), torch.float32, CPU).read((slice(0, 4096),), NO_BUFFER)
    assert 0.9 <= norm.min().item() < 0.91 < 1.09 < norm.max().item() <= 1.1
    bias = DummyTensor("q_proj.bias", (4096,), torch.float32, CPU).read((slice(0, 4096),), NO_BUFFER)
    assert -0.1 <= bias.min().item() < -0.09 < 0.09 < bias.max().item() <= 0.1


def test_a_part_of_a_dummy_tensor_is_that_part_of_the_whole() -> None:
    tensor = DummyTensor("model.embed_tokens.weight", (50, 400), torch.float32, CPU)
    whole = tensor.read(whole_box(tensor.shape), NO_BUFFER)
    assert torch.equal(tensor.read((slice(40, 50), slice(100, 200)), NO_BUFFER), whole[40:, 100:200])
    assert torch.equal(tensor.read((slice(1, 3), slice(200, 400)), NO_BUFFER), whole[1:3, 200:])


def test_dummy_tensors_differ_by_name_and_seed() -> None:
    box = (slice(0, 8), slice(0, 8))
    tensors = [
        DummyTensor(name, (8, 8), torch.float32, CPU, seed).read(box, NO_BUFFER)
        for name in ("a", "b")
        for seed in (0, 1)
    ]
    assert len({tuple(tensor.flatten().tolist()) for tensor in tensors}) == 4


def two_shards() -> ShardedParameter:
    """q: rows 2 to 4 of 6, padded to 3; k: no row of 4, padded to 1."""
    spans = {"q": Span(2, 2, 3, 6), "k": Span(4, 0, 1, 4)}
    return ShardedParameter((4, 5), torch.float32, stack_shards(spans, 5)).materialise(CPU)


def boxes(parameter: ShardedParameter, loaded: DummyTensor, shard_id: str | None) -> list[tuple[Box, Box]]:
    """Source and target of each copy that the parameter asks for."""
    return [(copy.source, copy.target) for copy in parameter.weight_loader(parameter, loaded, shard_id)]


def full(*shape: int) -> DummyTensor:
    return DummyTensor("w", shape, torch.float32, CPU)


def test_only_a_ranks_own_part_is_asked_for() -> None:
    parameter = two_shards()
    assert boxes(parameter, full(6, 5), "q") == [((slice(2, 4), slice(0, 5)), (slice(0, 2), slice(0, 5)))]
    assert boxes(parameter, full(4, 5), "k") == []


def test_a_fused_tensor_is_cut_shard_by_shard() -> None:
    spans = {"q": Span(2, 2, 3, 6), "k": Span(1, 1, 1, 4), "v": Span(1, 1, 1, 4)}
    parameter = ShardedParameter((5, 5), torch.float32, stack_shards(spans, 5))
    columns = slice(0, 5)
    assert boxes(parameter, full(14, 5), None) == [
        ((slice(2, 4), columns), (slice(0, 2), columns)),
        ((slice(7, 8), columns), (slice(3, 4), columns)),
        ((slice(11, 12), columns), (slice(4, 5), columns)),
    ]


@pytest.mark.parametrize(("shard_id", "shape"), [("q", [6, 5]), ("k", [4, 5]), (None, [10, 5])])
def test_the_full_shape_is_checked_before_cutting(shard_id: str | None, shape: list[int]) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"tensor w has shape [12, 5], not {shape}")):
        boxes(two_shards(), full(12, 5), shard_id)


def test_parameters_take_no_memory_before_weights_are_there() -> None:
    parameter = ShardedParameter((1 << 20, 1 << 20), torch.float32, stack_shards({None: Span.whole(1 << 20)}, 1 << 20))
    assert parameter.is_meta
