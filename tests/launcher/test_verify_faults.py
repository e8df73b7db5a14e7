"""Every fault of a checkpoint stops all of several real ranks, with one message that names tensor, file and rank.

Field reports B08 and B11; tests/model/test_checkpoint_faults.py has more of each kind.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.model.staging import num_readers

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"

Tensors = dict[str, torch.Tensor]


def edit(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    """Damage the tensors of a folder's one file."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def put(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    return edit(lambda tensors: tensors.update({name: value}))


def put_element(name: str, place: tuple[int, ...], value: float) -> Callable[[Path], None]:
    return edit(lambda tensors: tensors[name].index_put_(tuple(map(torch.tensor, place)), torch.tensor(value)))


def index(file_name: str) -> Callable[[Path], None]:
    """An index that puts a tensor into another file than the rest."""

    def damage(folder: Path) -> None:
        weight_map = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | {Q_PROJ: file_name}}))

    return damage


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def name_a_file_without_it(folder: Path) -> None:
    index("other.safetensors")(folder)
    save_file({NORM: torch.ones(64)}, folder / "other.safetensors")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)


def quantize(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (edit(lambda tensors: tensors.pop(Q_PROJ)), f"tensor {Q_PROJ} of shape [64, 64] is missing"),
    "unexpected": (
        put("model.extra", torch.ones(1)),
        "tensor model.extra in model.safetensors has no place in a Llama",
    ),
    "doubly given": (
        put(Q_PROJ.replace("q_proj", "qkv_proj"), torch.zeros(128, 64)),
        f"tensors {Q_PROJ} and {Q_PROJ.replace('q_proj', 'qkv_proj')} both fill",
    ),
    "in two files": (
        lambda folder: save_file({Q_PROJ: torch.zeros(64, 64)}, folder / "other.safetensors"),
        f"tensor {Q_PROJ} is in both model.safetensors and other.safetensors",
    ),
    "mis-shaped": (
        put(Q_PROJ, torch.zeros(72, 64)),
        f"tensor {Q_PROJ} in model.safetensors has shape [72, 64], not [64, 64]",
    ),
    "mis-typed": (
        put(Q_PROJ, torch.zeros(64, 64, dtype=torch.float8_e4m3fn)),
        f"tensor {Q_PROJ} in model.safetensors has type F8_E4M3",
    ),
    "truncated": (cut, "model.safetensors is cut short"),
    "not finite on one rank": (
        put_element(Q_PROJ, (40, 3), float("nan")),
        f"rank 1: checkpoint FOLDER cannot be loaded: tensor {Q_PROJ} in model.safetensors holds nan at [40, 3]",
    ),
    "not finite on all ranks": (
        put_element(NORM, (5,), float("inf")),
        f"checkpoint FOLDER cannot be loaded: tensor {NORM} in model.safetensors holds inf at [5]",
    ),
    "a head that is not the embedding it is tied to": (
        edit(lambda tensors: tensors.update({HEAD: tensors[EMBED].index_fill(0, torch.tensor([130]), 9.0)})),
        f"rank 1: checkpoint FOLDER cannot be loaded: tensor {HEAD} in model.safetensors differs from {EMBED}, to "
        "which config.json ties it, first in the rows of rank 1 at [130, 0]: 9.0 and not ",
    ),
    "absent file": (index("gone.safetensors"), "gone.safetensors cannot be opened: No such file or directory"),
    "without the tensor": (name_a_file_without_it, f"puts tensor {Q_PROJ} into other.safetensors, which lacks it"),
    "outside the folder": (index("../gone.safetensors"), "names the file '../gone.safetensors', which is outside"),
    "absolute": (index("/gone.safetensors"), "names the file '/gone.safetensors', which is outside the folder"),
    "pickled": (index("pytorch_model.bin"), "which is not a .safetensors file"),
    "Git LFS pointer": (
        write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors is a Git LFS pointer",
    ),
    "quantised": (quantize, "quantization 'fp8' is not supported"),
}

LOAD = """
    import json, os, sys, torch
    from paceline.coordinator.config import EngineConfig
    from paceline.coordinator.errors import InputError
    from paceline.model.config import ModelConfig
    from paceline.model.staging import StagingMemory
    from paceline.model.weights import load_model
    from paceline.worker.ranks import RankGroup

    ranks = RankGroup(EngineConfig(model="", tensor_parallel_size=2, device="cpu"))
    messages = []
    for folder in sys.argv[1:]:
        try:
            with StagingMemory(ranks.device, ranks.size) as staging, ranks.together() as stop:
                config = ModelConfig.from_folder(folder)
                load_model(folder, config, ranks.communicator, staging, torch.float32, max_model_len=64, stop=stop)
            messages.append("")
        except InputError as error:
            messages.append(str(error))
    ranks.close()
    os.write(1, (json.dumps(messages) + "\\n").encode())
"""


def run_ranks(tmp_path: Path, script: str, *arguments: str) -> list[Any]:
    """Run a script on two ranks; the JSON line of each."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=240)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def damaged(tmp_path: Path, tiny: Callable[..., Any]) -> Callable[[str, Callable[[Path], None]], Path]:
    """damaged(name, damage): a copy of the tiny Llama, damaged."""

    def make(name: str, damage: Callable[[Path], None]) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny("llama").folder, folder)
        damage(folder)
        return folder

    return make


def test_each_fault_is_raised_on_both_ranks_in_the_same_words(
    damaged: Callable[[str, Callable[[Path], None]], Path], tmp_path: Path
) -> None:
    folders = [damaged(name, damage) for name, (damage, _) in FAULTS.items()]
    sound = damaged("sound", lambda folder: None)
    first, second = run_ranks(tmp_path, LOAD, *map(str, folders), str(sound))
    assert first == second
    assert first[-1] == ""
    for message, folder, (_, wanted) in zip(first[:-1], folders, FAULTS.values(), strict=True):
        assert wanted.replace("FOLDER", str(folder)) in message
        assert "\n" not in message


SLOW = """
    import json, os, sys, time, torch
    from paceline.coordinator.config import EngineConfig
    from paceline.coordinator.errors import InputError
    from paceline.model.checkpoint_files import StoredTensor
    from paceline.model.config import ModelConfig
    from paceline.model.staging import StagingMemory
    from paceline.model.weights import load_model
    from paceline.worker.ranks import RankGroup

    ranks = RankGroup(EngineConfig(model="", tensor_parallel_size=2, device="cpu"))
    read, reads = StoredTensor.read, []
    told = sys.argv[1] + " told"

    def slowly(self, box, buffer):
        reads.append(time.time())
        if ranks.rank == 0:
            while not os.path.exists(told):
                time.sleep(0.01)
            time.sleep(1.0)
        return read(self, box, buffer)

    class Told:
        seen_at = None

        def __init__(self, stop):
            self.stop, self.is_set = stop, stop.is_set

        def set(self):
            Told.seen_at = Told.seen_at or time.time()
            self.stop.set()
            open(told, "w").close()

    StoredTensor.read = slowly
    try:
        with StagingMemory(ranks.device, ranks.size) as staging, ranks.together() as stop:
            folder, stop = sys.argv[1], Told(stop)
            config = ModelConfig.from_folder(folder)
            load_model(folder, config, ranks.communicator, staging, torch.float32, max_model_len=64, stop=stop)
    except InputError as error:
        message = str(error)
    line = {"rank": ranks.rank, "seen_at": Told.seen_at, "reads": reads}
    os.write(1, (json.dumps({**line, "message": message}) + "\\n").encode())
"""


def test_a_rank_that_still_reads_stops_soon_after_anothers_fault(
    damaged: Callable[[str, Callable[[Path], None]], Path], tmp_path: Path
) -> None:
    """Its first reads last until the other rank has told of the fault, and each a second longer."""
    folder = damaged("nan", put_element(Q_PROJ, (40, 3), float("nan")))
    slow, seeing = sorted(run_ranks(tmp_path, SLOW, str(folder)), key=lambda line: line["rank"])
    assert slow["message"] == seeing["message"]
    assert slow["message"].startswith("rank 1: checkpoint")
    assert len(slow["reads"]) < 10  # of 20 tensors
    # Each of its readers begins at most two more.
    assert sum(begun > seeing["seen_at"] for begun in slow["reads"]) <= 2 * num_readers(2)
    assert slow["seen_at"] is None


def test_verify_and_its_ranks_end_with_one_line(
    damaged: Callable[[str, Callable[[Path], None]], Path],
) -> None:
    """Field report B08: no rank waits for the one that failed."""
    folder = damaged("nan", put_element(Q_PROJ, (40, 3), float("nan")))
    command = [sys.executable, "-m", "paceline.launcher.start", "verify", str(folder), "--tp", "2"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert result.returncode == 2
    # Rank 0 may have loaded its half by then.
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("paceline: loaded")]
    assert line.startswith(f"paceline: rank 1: checkpoint {folder} cannot be loaded: tensor {Q_PROJ}")
