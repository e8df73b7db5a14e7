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
from paceline.model.parameter import ShardedParameter, stack_shards
from paceline.model.shard_plan import Span
from paceline.model.weights import load_model

CPU = torch.device("cpu")
ODD = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3, "vocab_size": 259}


def load_all(folder: object, config: ModelConfig, tp: int, load_format: str) -> list[CausalLM]:
    def body(comm: Communicator) -> CausalLM:
        return load_model(str(folder), config, comm, CPU, torch.float32, max_model_len=64, load_format=load_format)

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
            there = full.narrow(shard.dim, shard.span.start, shard.span.length)
            here = parameter.data.narrow(shard.dim, shard.offset, shard.span.length)
            assert torch.equal(there.where(~there.isnan(), here), here)
            there.copy_(here)
            padding = shard.span.padded - shard.span.length
            assert not parameter.data.narrow(shard.dim, shard.offset + shard.span.length, padding).any()
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
    matrix = DummyTensor("model.layers.0.mlp.up_proj.weight", (512, 256), torch.float32, CPU)[:512, :256]
    assert matrix.std().item() == pytest.approx(1 / 16, rel=0.02)
    assert matrix.mean().item() == pytest.approx(0, abs=1e-3)
    # Neighbours in a row or a column have nothing to do with one another: 4 standard errors of the correlation.
    for first, second in ((matrix[1:], matrix[:-1]), (matrix[:, 1:], matrix[:, :-1])):
        correlation = torch.corrcoef(torch.stack((first.flatten(), second.flatten())))[0, 1]
        assert abs(correlation.item()) < 4 / matrix.numel() ** 0.5
    assert matrix.unique().numel() > 0.98 * matrix.numel()
    norm = DummyTensor("model.norm.weight", (4096,), torch.float32, CPU)[(slice(None),)]
    assert 0.9 <= norm.min().item() < 0.91 < 1.09 < norm.max().item() <= 1.1
    bias = DummyTensor("q_proj.bias", (4096,), torch.float32, CPU)[(slice(None),)]
    assert -0.1 <= bias.min().item() < -0.09 < 0.09 < bias.max().item() <= 0.1


def test_a_slice_of_a_large_dummy_tensor_is_that_part_of_the_whole() -> None:
    tensor = DummyTensor("model.embed_tokens.weight", (5, 1 << 22), torch.float32, CPU)  # made in two pieces
    whole = tensor[:, :]
    assert torch.equal(tensor[4:5, 100:200], whole[4:5, 100:200])
    assert torch.equal(tensor[1:3, 1 << 21 :], whole[1:3, 1 << 21 :])


def test_dummy_tensors_differ_by_name_and_seed() -> None:
    slices = (slice(0, 8), slice(0, 8))
    tensors = [DummyTensor(name, (8, 8), torch.float32, CPU, seed)[slices] for name in ("a", "b") for seed in (0, 1)]
    assert len({tuple(tensor.flatten().tolist()) for tensor in tensors}) == 4


class RecordingTensor:
    """A full tensor that remembers which slices were read."""

    name = "w"
    dtype = torch.float32

    def __init__(self, full: torch.Tensor) -> None:
        self._full = full
        self.shape = tuple(full.shape)
        self.read: list[tuple[slice, ...]] = []

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        self.read.append(slices)
        return self._full[slices]


def two_shards() -> ShardedParameter:
    """q: rows 2 to 4 of 6, padded to 3; k: no row of 4, padded to 1."""
    spans = {"q": Span(2, 2, 3, 6), "k": Span(4, 0, 1, 4)}
    return ShardedParameter((4, 5), torch.float32, stack_shards(spans, 5)).materialise(CPU)


def test_only_a_ranks_own_slices_are_read() -> None:
    parameter, full = two_shards(), torch.randn(6, 5)
    loaded = RecordingTensor(full)
    parameter.weight_loader(parameter, loaded, "q")
    assert loaded.read == [(slice(2, 4), slice(0, 5))]
    nothing = RecordingTensor(torch.randn(4, 5))
    parameter.weight_loader(parameter, nothing, "k")
    assert nothing.read == []
    assert torch.equal(parameter.data, torch.cat((full[2:4], torch.zeros(2, 5))))


def test_a_fused_tensor_is_cut_shard_by_shard() -> None:
    parameter, full = two_shards(), torch.randn(10, 5)
    loaded = RecordingTensor(full)
    parameter.weight_loader(parameter, loaded, None)
    assert loaded.read == [(slice(2, 4), slice(0, 5))]
    assert torch.equal(parameter.data[:2], full[2:4])


@pytest.mark.parametrize(("shard_id", "shape"), [("q", [6, 5]), ("k", [4, 5]), (None, [10, 5])])
def test_the_full_shape_is_checked_before_slicing(shard_id: str | None, shape: list[int]) -> None:
    parameter, loaded = two_shards(), RecordingTensor(torch.zeros(12, 5))
    with pytest.raises(CheckpointError, match=re.escape(f"tensor w has shape [12, 5], not {shape}")):
        parameter.weight_loader(parameter, loaded, shard_id)
    assert loaded.read == []


def test_parameters_take_no_memory_before_weights_are_there() -> None:
    parameter = ShardedParameter((1 << 20, 1 << 20), torch.float32, stack_shards({None: Span.whole(1 << 20)}, 1 << 20))
    assert parameter.is_meta
