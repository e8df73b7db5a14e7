"""Any shape of model at any number of ranks, its weights apart or fused: the checkpoint again, and the same logits."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from paceline.model.checkpoint_tensors import CheckpointTensors
from paceline.model.communicator import Communicator, SingleRank, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.ledger import get_parameter, tensor_targets
from paceline.model.parameter import expected_shape
from paceline.model.registry import MODEL_CLASSES
from paceline.model.shard_table import plan_model
from paceline.model.staging import StagingMemory
from paceline.model.verify_forward import MAX_MODEL_LEN, compare_logits, probe_logits
from paceline.model.verify_shards import Difference, verify_shards
from paceline.model.weights import load_model

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json of any small model."""
    kv_heads, group = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return {
        "architectures": [draw(st.sampled_from(sorted(MODEL_CLASSES)))],
        "hidden_size": draw(st.integers(4, 40)) * 2,
        "intermediate_size": draw(st.integers(1, 90)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 8, 16])),
        "vocab_size": draw(st.integers(2, 200)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }


def write(folder: Path, config: dict[str, Any], fused: bool) -> None:
    """A checkpoint of random values in a mix of types; fused: q, k, v and gate, up are stored as one."""
    (folder / "config.json").write_text(json.dumps(config))
    parsed = ModelConfig.from_folder(folder)
    model = MODEL_CLASSES[parsed.architecture](parsed, SingleRank(), torch.float32, 1)
    generator = torch.Generator().manual_seed(0)
    content = {}
    for number, (name, (parameter_name, shard_id)) in enumerate(tensor_targets(model).items()):
        parameter = get_parameter(model, parameter_name)
        stacked = len(parameter.shards) > 1
        if stacked and (shard_id in parameter.shards) == fused:
            continue
        values = 0.3 * torch.randn(expected_shape(parameter, shard_id), generator=generator)
        content[name] = (values + name.endswith("norm.weight")).to(DTYPES[number % 3])
    save_file(content, folder / "model.safetensors")


def load(folder: Path, config: ModelConfig, comm: Communicator) -> CausalLM:
    with StagingMemory(CPU, comm.size) as staging:
        return load_model(folder, config, comm, staging, torch.float32, max_model_len=MAX_MODEL_LEN)


@settings(max_examples=40, deadline=None)
@given(shapes(), st.booleans(), st.integers(1, 8))
def test_shards_are_the_checkpoint_and_compute_what_it_does(config: dict[str, Any], fused: bool, tp: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, config, fused)
        parsed = ModelConfig.from_folder(folder)
        plan = plan_model(parsed, tp, torch.float32)

        def body(comm: Communicator) -> tuple[list[Difference], torch.Tensor]:
            model = load(folder, parsed, comm)
            with CheckpointTensors(folder) as tensors:
                return verify_shards(model, plan, comm, tensors), probe_logits(model, comm, CPU)

        differences, logits = run_simulated_ranks(tp, body)[0]
        assert differences == []
        unsharded = probe_logits(load(folder, parsed, SingleRank()), SingleRank(), CPU)
        assert compare_logits(logits, unsharded)[1] is None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_the_probe_is_not_blind(tp: int, fused: bool, tmp_path: Path) -> None:
    """Were one element of a shard wrong, the logits would say so."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "vocab_size": 99,
        "attention_bias": True,
    }
    write(tmp_path, config, fused)
    parsed = ModelConfig.from_folder(tmp_path)
    unsharded = probe_logits(load(tmp_path, parsed, SingleRank()), SingleRank(), CPU)

    def body(comm: Communicator) -> torch.Tensor:
        model = load(tmp_path, parsed, comm)
        if comm.rank == 0:
            model.get_parameter("model.layers.1.self_attn.qkv_proj.bias").data[-1] += 0.5  # of a value head
        return probe_logits(model, comm, CPU)

    error, difference = compare_logits(run_simulated_ranks(tp, body)[0], unsharded)
    assert difference is not None
    assert difference.check == "forward"
    assert difference.found != difference.expected
    assert error > 1e-3
