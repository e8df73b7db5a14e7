"""The replay of a trace starts a server and measures it; its models have a text for every token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import azure_replay
import pytest
from tiny_configs import QWEN3

from paceline.launcher.default_model import default_model_path
from paceline.launcher.detokenizer import Detokenizer
from paceline.launcher.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests" / "launcher" / "bench" / "traces" / "azure_conv_head.csv"
CONFIG = QWEN3 | {"vocab_size": 50000}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model's folder."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    azure_replay.write_tokenizer(CONFIG["vocab_size"], folder)
    return folder


def replay(model: Path, keep: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = [str(ROOT / "benchmarks" / "azure_replay.py"), "--model-folder", str(model), "--trace", str(TRACE)]
    path = os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *script, "--keep", str(keep), "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def test_it_replays_the_trace(model: Path, tmp_path: Path) -> None:
    result = replay(model, tmp_path / "kept", "--scale", "10", "--duration", "0.46", "--max-num-seqs", "2")
    assert result.returncode == 0, result.stderr
    assert "3 of 3 sent, 3 answered" in result.stdout
    assert result.stdout.splitlines()[-1] == "server      ended with exit status 0"
    figures = json.loads((tmp_path / "kept" / "bench.json").read_text())
    assert figures["slo_ms"] == {"ttft": 500, "itl": 50}
    assert [row[4::2] for row in figures["rows"]] == [[374, 44], [396, 109], [879, 55]]
    # With the two of the request that asks which fields the server takes.
    assert "paceline_generation_tokens_total 210.0" in (tmp_path / "kept" / "metrics.txt").read_text()
    assert '"max_num_seqs": 2' in (tmp_path / "kept" / "serve.txt").read_text()


def test_a_server_that_does_not_start_says_why(model: Path, tmp_path: Path) -> None:
    result = replay(model, tmp_path / "kept", "--max-num-seqs", "0")
    assert result.returncode == 1
    assert "the server did not start:\npaceline: --max-num-seqs must be" in result.stderr


def test_every_token_has_a_text(tmp_path: Path) -> None:
    azure_replay.write_model("qwen3-0.6b", tmp_path / "model")
    tokenizer, plain = Tokenizer(tmp_path / "model"), Tokenizer(default_model_path())
    size = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    assert len(tokenizer.backend) == size == 151936
    assert Detokenizer(tokenizer.backend).feed([49152, size - 1]) == " word49152 word151935"
    text = "The word49152 and 151935 others"
    assert tokenizer.encode(text) == plain.encode(text)
