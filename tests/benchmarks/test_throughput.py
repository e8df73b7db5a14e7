"""The throughput benchmark runs on a folder with a config alone, and says what the peers' files say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_configs import QWEN3

ROOT = Path(__file__).parents[2]
CONFIG = QWEN3 | {"vocab_size": 2048}


def run(folder: Path, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    script = [str(ROOT / "benchmarks" / "throughput.py"), "--model-folder", str(folder), "--device", "cpu", "--quick"]
    path = os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *torchrun, *script, *arguments], capture_output=True, text=True, env=environment, timeout=240
    )


def figures(output: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in output.splitlines())


def test_it_prints_what_the_peers_files_have(tmp_path: Path) -> None:
    result = run(tmp_path / "tiny")
    assert result.returncode == 0, result.stderr
    found = figures(result.stdout)
    peer = json.loads((ROOT / "benchmarks" / "peers" / "vllm-0.25_qwen3-0.6b_tp1.json").read_text())
    shared = {name for name in peer if not name.startswith("W4")} - {"torch", "source", "date"}
    assert shared <= set(found)
    assert (found["engine"], found["model"], found["tp"]) == ("paceline", "tiny", "1")
    assert all(float(found[name]) > 0 for name in shared if name.startswith("W1"))
    assert 0 < float(found["start_s"]) < float(found["first_token_s"]) < 120


def test_two_ranks_print_once(tmp_path: Path) -> None:
    result = run(tmp_path / "tiny", "--only", "W3b", "--temperature", "0.6", "--top-p", "0.9", "--top-k", "9", ranks=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("W3b_ttft_1024_ms") == 1
    found = figures(result.stdout)
    assert (found["tp"], found["temperature"], found["top_p"], found["top_k"]) == ("2", "0.600", "0.900", "9")
    assert not any(name.startswith(("W1", "W2", "W4")) for name in found)


def test_an_unknown_workload_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path / "tiny", "--only", "W5")
    assert result.returncode == 2
    assert "W5: there are W1, W2, W3, W3b, W4" in result.stderr
