"""No rank ends its readers or unpins its memory while another still reads, which that would hold up."""

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

from safetensors.torch import load_file, save_file

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"

SLOW_RANK_0 = """
    import json, os, sys, time
    from pathlib import Path
    from paceline.coordinator.config import EngineConfig
    from paceline.coordinator.errors import InputError
    from paceline.model.shard_reader import ShardReader
    from paceline.model.staging import StagingMemory
    from paceline.worker.ranks import RankGroup
    from paceline.worker.verification import ShardVerifier
    from paceline.worker.worker import Worker

    sound, damaged, folder = map(Path, sys.argv[1:])
    options = {"model": str(sound), "tensor_parallel_size": 2, "device": "cpu", "num_blocks": 8}
    ranks = RankGroup(EngineConfig(**options))
    read, leave = ShardReader.run, StagingMemory.__exit__

    def say(what):
        with log.open("a") as file:
            file.write(f"{ranks.rank} {what}\\n")

    def read_last_on_rank_0(reader):
        while ranks.rank == 0 and not (log.exists() and log.read_text()):
            time.sleep(0.01)
        time.sleep(0.3 * (ranks.rank == 0))  # in which the other would let go
        try:
            if fails and ranks.rank == 1:
                raise OSError("the disk is gone")
            return read(reader)
        finally:
            say("has read")

    def told(memory, *error):
        say("lets go")
        return leave(memory, *error)

    ShardReader.run, StagingMemory.__exit__ = read_last_on_rank_0, told
    cases = {
        "serving": (lambda: Worker(EngineConfig(**options), ranks), False),
        "verifying": (lambda: ShardVerifier(sound, "auto", forward=False).run(ranks), False),
        "a bad value": (lambda: Worker(EngineConfig(**options | {"model": str(damaged)}), ranks), False),
        "no disk": (lambda: Worker(EngineConfig(**options), ranks), True),
    }
    messages = {}
    for name, (start, fails) in cases.items():
        log, messages[name] = folder / name, ""
        try:
            start()
        except InputError as error:
            messages[name] = str(error)
    ranks.close()
    os.write(1, (json.dumps(messages) + "\\n").encode())
"""


def test_ranks_let_go_of_what_they_load_with_once_all_have_loaded_or_failed(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    sound = tiny("llama").folder
    damaged = tmp_path / "damaged"
    shutil.copytree(sound, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors[Q_PROJ][40, 3] = float("nan")
    save_file(tensors, damaged / "model.safetensors")
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text(textwrap.dedent(SLOW_RANK_0))
    logs.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    arguments = [str(sound), str(damaged), str(logs)]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=240)
    assert result.returncode == 0, result.stderr
    first, second = map(json.loads, result.stdout.splitlines())
    assert first == second
    assert (first["serving"], first["verifying"]) == ("", "")
    assert f"tensor {Q_PROJ} in model.safetensors holds nan" in first["a bad value"]
    assert first["no disk"] == "rank 1: OSError: the disk is gone"
    for name in first:
        lines = (logs / name).read_text().splitlines()
        assert lines[:2] == ["1 has read", "0 has read"], name
        assert sorted(lines[2:]) == ["0 lets go", "1 lets go"], name
