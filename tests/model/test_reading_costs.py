"""A rank reads its own bytes and holds its own shard, whatever the size of the full tensors."""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.errors import CheckpointError
from paceline.model.shard_reader import ShardReader
from paceline.model.staging import StagingMemory
from paceline.model.weights import load_model

# 2 GiB in one file that takes no disk: its elements are a hole, which reads as zeros.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 65536,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

MEASURE = """
    import json, resource, sys
    from pathlib import Path
    import torch
    from paceline.model.communicator import SingleRank
    from paceline.model.config import ModelConfig
    from paceline.model.mapped_columns import MappedFile
    from paceline.model.staging import StagingMemory
    from paceline.model.weights import load_model

    folder, rank, size, dtype = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
    comm = SingleRank()
    comm.rank, comm.size = rank, size  # loading calls no collective
    config = ModelConfig.from_folder(folder)

    mapped, copy_columns = [], MappedFile.copy_columns

    def counted(self, first, pitch, out):
        mapped.append(out.nbytes)
        return copy_columns(self, first, pitch, out)

    MappedFile.copy_columns = counted

    def bytes_read():  # asked of the system, or copied from mapped files
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["rchar"]) + sum(mapped)

    torch.ones(8).sum()
    peak, read = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, bytes_read()
    with StagingMemory(torch.device("cpu"), size) as staging:
        model = load_model(folder, config, comm, staging, dtype, max_model_len=64)
    result = {
        "shard": sum(parameter.nbytes for parameter in model.parameters()),
        "read": bytes_read() - read,
        "peak": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024,
    }
    print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of CONFIG, all zeros."""
    folder = tmp_path_factory.mktemp("sparse")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hidden, mlp, vocab, kv = 2048, 65536, 262144, 1024
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": [vocab, hidden],
        "model.norm.weight": [hidden],
        f"{layer}.input_layernorm.weight": [hidden],
        f"{layer}.post_attention_layernorm.weight": [hidden],
        f"{layer}.self_attn.q_proj.weight": [hidden, hidden],
        f"{layer}.self_attn.k_proj.weight": [kv, hidden],
        f"{layer}.self_attn.v_proj.weight": [kv, hidden],
        f"{layer}.self_attn.o_proj.weight": [hidden, hidden],
        f"{layer}.mlp.gate_proj.weight": [mlp, hidden],
        f"{layer}.mlp.up_proj.weight": [mlp, hidden],
        f"{layer}.mlp.down_proj.weight": [hidden, mlp],
    }
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def measure(folder: Path, rank: int, size: int, dtype: str) -> dict[str, int]:

    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(folder), str(rank), str(size), dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    costs: dict[str, int] = json.loads(result.stdout)
    return costs


@pytest.mark.parametrize(("rank", "size"), [(0, 8), (7, 8), (1, 3)])
def test_a_rank_reads_no_more_than_its_shard(rank: int, size: int, sparse: Path) -> None:
    costs = measure(sparse, rank, size, "bfloat16")
    assert costs["read"] <= 1.1 * costs["shard"]
    assert costs["peak"] - costs["shard"] < 512 << 20


def test_a_cast_takes_no_full_tensor_either(sparse: Path) -> None:
    costs = measure(sparse, 2, 8, "float32")
    assert costs["read"] <= 1.1 * costs["shard"] / 2
    assert costs["peak"] - costs["shard"] < 512 << 20


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """Notes collections of garbage, which begin at every few objects meanwhile; leaves the collector as it was."""
    phases: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        phases.append(phase)

    thresholds = gc.get_threshold()
    gc.set_threshold(10)
    gc.callbacks.append(note)
    yield phases
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    gc.enable()


def test_no_garbage_is_collected_meanwhile_since_that_lets_no_thread_run(
    collections: list[str], tiny: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("qwen2").folder
    config = ModelConfig.from_folder(folder)
    read, meanwhile = ShardReader.run, []

    def noted(reader: ShardReader) -> list[str]:
        collections.clear()  # one may come as load_model begins
        faults = read(reader)
        meanwhile.append(list(collections))
        return faults

    monkeypatch.setattr(ShardReader, "run", noted)
    with StagingMemory(torch.device("cpu"), 1) as staging:
        load_model(folder, config, SingleRank(), staging, torch.float32, max_model_len=64)
    assert meanwhile == [[]]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("folder_exists", [True, False])
def test_the_collector_is_left_as_it_was(
    enabled: bool, folder_exists: bool, collections: list[str], tiny: Callable, tmp_path: Path
) -> None:
    folder = tiny("qwen2").folder
    config = ModelConfig.from_folder(folder)
    (gc.enable if enabled else gc.disable)()
    folder = folder if folder_exists else tmp_path
    with (
        StagingMemory(torch.device("cpu"), 1) as staging,
        contextlib.nullcontext() if folder_exists else pytest.raises(CheckpointError),
    ):
        load_model(folder, config, SingleRank(), staging, torch.float32, max_model_len=64)
    assert gc.isenabled() == enabled
