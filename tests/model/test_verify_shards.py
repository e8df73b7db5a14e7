"""verify_shards names the first element that is not the checkpoint's, whatever the loader thinks of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.model.checkpoint_tensors import CheckpointTensors
from paceline.model.communicator import Communicator, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.shard_table import plan_model
from paceline.model.staging import StagingMemory
from paceline.model.verify_shards import Difference, verify_shards
from paceline.model.weights import load_model

CPU = torch.device("cpu")
QKV = "model.layers.0.self_attn.qkv_proj.weight"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
EMBED = "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"

Damage = Callable[[CausalLM, int], None]


@pytest.fixture
def folder(tiny: Callable) -> Path:
    """4 heads of 16, 2 KV heads; the vocabulary and the MLP do not divide by 4."""
    found: Path = tiny("llama", vocab_size=259, intermediate_size=90).folder
    return found


def differences(folder: Path, tp: int, damage: Damage, dtype: torch.dtype = torch.float32) -> list[Difference]:
    """What is found once each rank's model was damaged after loading."""
    config = ModelConfig.from_folder(folder)
    plan = plan_model(config, tp, dtype)

    def body(comm: Communicator) -> list[Difference]:
        with StagingMemory(CPU, comm.size) as staging:
            model = load_model(folder, config, comm, staging, dtype, max_model_len=8)
        damage(model, comm.rank)
        with CheckpointTensors(folder) as tensors:
            return verify_shards(model, plan, comm, tensors)

    first, *others = run_simulated_ranks(tp, body)
    assert others == [[]] * (tp - 1)  # one rank says it
    return first


def put(name: str, on_rank: int, place: tuple[int, int], value: float) -> Damage:
    def damage(model: CausalLM, rank: int) -> None:
        if rank == on_rank:
            model.get_parameter(name).data[place] = value

    return damage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_nothing_is_found_where_nothing_is_wrong(tp: int, dtype: torch.dtype, folder: Path) -> None:
    assert differences(folder, tp, lambda model, rank: None, dtype) == []


def test_one_wrong_element(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    embedding = put(EMBED, 2, (5, 7), 9.0)
    expected = stored[EMBED][2 * 72 + 5, 7].item()
    (found,) = differences(folder, 4, embedding)
    assert found == Difference("checkpoint", EMBED, 2, (149, 7), 9.0, expected)
    assert str(found) == f"{EMBED} on rank 2 at [149, 7]: found 9.0, and the checkpoint has {expected!r}"


def test_one_wrong_element_of_a_column_shard(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    (found,) = differences(folder, 4, put(O_PROJ, 3, (1, 2), 9.0))
    assert found == Difference("checkpoint", O_PROJ, 3, (1, 50), 9.0, stored[O_PROJ][1, 50].item())


def test_one_wrong_bit(folder: Path) -> None:
    def damage(model: CausalLM, rank: int) -> None:
        if rank == 1:
            model.get_parameter(EMBED).data.view(torch.int32)[3, 4] ^= 1

    (found,) = differences(folder, 4, damage)
    assert (found.check, found.rank, found.index) == ("checkpoint", 1, (75, 4))


@pytest.mark.parametrize(("value", "shown"), [(0.5, 0.5), (-0.0, -0.0)])
def test_padding_that_is_not_zero(value: float, shown: float, folder: Path) -> None:
    # 259 ids on 4 ranks are 72 each, and 43 on the last; 90 columns are 24 each, and 18 on the last.
    (found,) = differences(folder, 4, put(EMBED, 3, (43, 1), value))
    assert found == Difference("padding", EMBED, 3, (43, 1), shown, 0.0)
    (found,) = differences(folder, 4, put(DOWN, 3, (6, 23), value))
    assert found == Difference("padding", DOWN, 3, (6, 23), shown, 0.0)


def test_copies_of_a_kv_head_that_differ(folder: Path) -> None:
    # A rank has 16 rows each of q, k and v; ranks 2 and 3 share the second KV head.
    stored = load_file(folder / "model.safetensors")[QKV.replace("qkv", "k")]
    (found,) = differences(folder, 4, put(QKV, 3, (16 + 4, 9), 9.0))
    assert found == Difference("copies", QKV, 3, (20, 9), 9.0, stored[20, 9].item())


def test_copies_of_a_norm_that_differ(folder: Path) -> None:
    def damage(model: CausalLM, rank: int) -> None:
        if rank == 1:
            model.model.norm.weight.data[11] = 9.0

    (found,) = differences(folder, 2, damage)
    assert (found.check, found.parameter, found.rank, found.index) == ("copies", "model.norm.weight", 1, (11,))


def test_copies_that_agree_and_are_wrong(folder: Path) -> None:
    def damage(model: CausalLM, rank: int) -> None:
        model.model.norm.weight.data[11] = 9.0

    (found,) = differences(folder, 2, damage)
    assert (found.check, found.rank, found.index, found.found) == ("checkpoint", 0, (11,), 9.0)


def test_shards_of_two_ranks_exchanged(folder: Path) -> None:
    def damage(model: CausalLM, rank: int) -> None:
        if rank < 2:
            full = load_file(folder / "model.safetensors")[EMBED]
            model.get_parameter(EMBED).data.copy_(full[72 * (1 - rank) : 72 * (2 - rank)])

    (found,) = differences(folder, 4, damage)
    assert (found.check, found.parameter, found.rank, found.index) == ("checkpoint", EMBED, 0, (0, 0))


def test_each_parameter_has_a_difference_of_its_own(folder: Path) -> None:
    def damage(model: CausalLM, rank: int) -> None:
        for name in (EMBED, O_PROJ):
            model.get_parameter(name).data[0, 0] = 9.0

    assert [found.parameter for found in differences(folder, 2, damage)] == [EMBED, O_PROJ]


def test_a_plan_that_leaves_rows_out(folder: Path) -> None:
    """Were the plan itself wrong on loading and verifying alike, the shards would not make the tensor's shape."""
    config = ModelConfig.from_folder(folder)
    plan = plan_model(config, 4, torch.float32)
    embedding = plan.parameters[0]
    shard = embedding.shards[0][None]
    short = replace(shard.span, length=shard.span.length - 1, padded=shard.span.padded - 1)
    shards = [{None: replace(shard, span=short)}, *embedding.shards[1:]]
    plan = replace(plan, parameters=[replace(embedding, shards=shards)])

    def body(comm: Communicator) -> list[Difference]:
        with StagingMemory(CPU, comm.size) as staging:
            model = load_model(folder, config, comm, staging, torch.float32, max_model_len=8)
        with CheckpointTensors(folder) as tensors:
            return verify_shards(model, plan, comm, tensors)

    (found,) = run_simulated_ranks(4, body)[0]
    assert str(found) == f"{EMBED}: all ranks hold 258 of the 259 rows or columns that are cut"
