"""The `verify` command on the default model and on tiny ones, sound and damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import termios
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest

from paceline.coordinator.errors import InputError
from paceline.launcher.start import number_of_ranks
from paceline.launcher.tp_range import parse_tp_range

LAYER_PARAMETERS = 182
"""Of SmolLM2-135M: embedding, final norm, and 6 in each of 30 layers."""


def verify(*arguments: str, program: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    program = program or ["-m", "paceline.launcher.start"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, *program, "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)


def report(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_the_default_model_at_1_to_8_ranks(default_model: Path) -> None:
    found = report(verify(str(default_model), "--tp", "1..8", "--json"))
    assert found["verified"] is True
    assert found["dtype"] == "bfloat16"
    assert [result["tp"] for result in found["results"]] == list(range(1, 9))
    for result in found["results"]:
        assert len(result["parameters"]) == LAYER_PARAMETERS
        assert all(parameter["verified"] for parameter in result["parameters"])
        assert result["differences"] == []
        assert result["forward"]["largest_difference"] <= result["forward"]["tolerance"]


def test_a_process_for_each_rank(default_model: Path) -> None:
    result = verify(str(default_model), "--tp", "2")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    columns = [line.split("  ") for line in lines if line.startswith("model.layers.*.self_attn.qkv_proj")]
    assert [[cell.strip() for cell in line if cell.strip()] for line in columns] == [
        [
            "model.layers.*.self_attn.qkv_proj.weight",
            "rows of q, k, v; 25.0% padding",
            "640 x 576",
            "30",
            "22,118,400",
            "yes",
        ]
    ]
    assert "verified: the shards put together are the checkpoint bit for bit, copies agree, padding is zero" in lines
    assert "NO" not in result.stdout.split()


def test_a_terminal_sees_the_progress(tiny: Callable[..., Any]) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, "-m", "paceline.launcher", "verify", str(tiny("llama").folder)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, timeout=240, check=True)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert "loading:   0%" in shown
    assert "paceline: loaded 0.000 GB in" in shown


DAMAGE = """
    import os, sys, torch
    import paceline.worker.verification as verification
    from paceline.launcher.__main__ import main

    load = verification.load_model

    def damaged(*arguments, **options):
        model = load(*arguments, **options)
        comm = arguments[2]
        if (comm.rank, comm.size) == (1, 2):
            model.model.layers[1].mlp.down_proj.weight.data[3, 5] = 9.0
        return model

    verification.load_model = damaged
    main()
"""

TWICE = """
    import torch.nn.functional as F
    from paceline.model.linear import RowParallelLinear
    from paceline.launcher.__main__ import main

    # Field report B12: the bias added before the sum, so once a rank.
    RowParallelLinear.forward = lambda self, x: self._comm.all_reduce(F.linear(x, self.weight, self.bias))
    main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    def write(text: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        return [str(path)]

    return write


def test_a_damaged_shard_is_named_and_the_exit_status_says_so(
    script: Callable[[str], list[str]], tiny: Callable[..., Any]
) -> None:
    checkpoint = tiny("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    expected = checkpoint.reference.state_dict()[name][3, 64 + 5].item()
    result = verify(str(checkpoint.folder), "--tp", "1,2", program=script(DAMAGE))
    assert result.returncode == 1
    wanted = f"paceline: at 2 ranks, {name} on rank 1 at [3, 69]: found 9.0, and the checkpoint has {expected!r}"
    assert result.stderr.splitlines()[-1] == wanted
    assert "NOT verified: 1 of 2 numbers of ranks differ" in result.stdout


def test_a_damaged_shard_under_real_ranks(script: Callable[[str], list[str]], tiny: Callable[..., Any]) -> None:
    folder = str(tiny("llama").folder)
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script(DAMAGE)]
    result = verify(folder, "--tp", "2", "--json", program=program)
    assert result.returncode != 0
    (difference, _) = json.loads(result.stdout)["results"][0]["differences"]
    assert (difference["check"], difference["rank"], difference["index"]) == ("checkpoint", 1, [3, 69])
    assert "paceline: at 2 ranks, model.layers.1.mlp.down_proj.weight on rank 1 at [3, 69]: found 9.0" in result.stderr


def test_a_forward_pass_that_is_wrong_though_the_shards_are_right(
    script: Callable[[str], list[str]], tiny: Callable[..., Any]
) -> None:
    folder = str(tiny("llama", attention_bias=True).folder)
    result = verify(folder, "--tp", "1..2", "--json", program=script(TWICE))
    assert result.returncode == 1
    alone, together = json.loads(result.stdout)["results"]
    assert alone["differences"] == []
    assert [difference["check"] for difference in together["differences"]] == ["forward"]
    assert all(parameter["verified"] for parameter in together["parameters"])


def test_a_fault_of_the_checkpoint_is_one_line(tiny: Callable[..., Any], tmp_path: Path) -> None:
    source = tiny("llama").folder
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-10])
    result = verify(str(tmp_path), "--tp", "1..2")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"paceline: checkpoint {tmp_path} cannot be loaded: model.safetensors is cut short")
    assert result.stdout == ""


def test_the_plan_needs_no_weights(tmp_path: Path) -> None:
    models.write_folder("qwen3-8b", tmp_path)
    found = report(verify(str(tmp_path), "--config-only", "--tp", "1,2", "--json"))
    assert found["verified"] is False
    one, two = found["results"]
    assert (one["weight_bytes"], one["kv_bytes_per_token"]) == (16_381_470_720, 147_456)
    assert two["kv_bytes_per_token"] == 73_728
    # (0.9 * memory - weights) / bytes of a token
    assert one["cache_tokens"]["16 GiB"] == 0
    assert one["cache_tokens"]["80 GiB"] == int((0.9 * 80 * 2**30 - 16_381_470_720) // 147_456)
    table = verify(str(tmp_path), "--config-only")
    assert table.returncode == 0
    assert [line.split()[0] for line in table.stdout.splitlines() if line.strip()][-4:] == ["1", "2", "4", "8"]


def under_torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """verify on two ranks that torchrun starts itself."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return verify(*arguments, program=[*torchrun, "-m", "paceline.launcher"])


def test_the_plan_under_torchrun_needs_no_weights_and_is_shown_once(tmp_path: Path) -> None:
    models.write_folder("qwen3-8b", tmp_path)
    found = report(under_torchrun(str(tmp_path), "--config-only", "--tp", "1,4", "--json"))
    assert [(result["tp"], result["kv_bytes_per_token"]) for result in found["results"]] == [(1, 147_456), (4, 36_864)]


def test_several_numbers_under_torchrun_are_refused_in_one_line() -> None:
    result = under_torchrun("no-such-model", "--tp", "1,2")
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("paceline:")]
    assert "--tp 1,2 tries several numbers of ranks in one process" in line
    assert "ValueError" not in result.stderr


def test_several_numbers_on_gpus_are_refused() -> None:
    result = verify("no-such-model", "--device", "cuda", "--tp", "1..2")
    assert result.returncode == 2
    assert "on GPUs, give one number" in result.stderr


@pytest.mark.parametrize("tp", [[], ["--tp", "1"]])
def test_one_rank_on_a_gpu(tp: list[str], script: Callable[[str], list[str]], tiny: Callable[..., Any]) -> None:
    # Without a GPU the rank is given the CPU when it asks for one.
    program = script(
        """
        import torch
        import paceline.worker.ranks as ranks
        from paceline.launcher.__main__ import main

        if not torch.cuda.is_available():
            choose = ranks.choose_device
            ranks.choose_device = lambda wanted, rank, size: choose({"cuda": "cpu"}[wanted], rank, size)
        main()
        """
    )
    found = report(verify(str(tiny("llama").folder), "--device", "cuda", "--json", *tp, program=program))
    assert found["verified"] is True
    assert [result["tp"] for result in found["results"]] == [1]


def test_a_picture_of_the_plan(tiny: Callable[..., Any], tmp_path: Path) -> None:
    from matplotlib.image import imread

    picture = tmp_path / "plan.png"
    result = verify(str(tiny("qwen2").folder), "--config-only", "--tp", "1,3,4", "--plot", str(picture))
    assert result.returncode == 0, result.stderr
    height, width, _ = imread(picture).shape
    assert width > 1500
    assert height > 800


@pytest.mark.parametrize(
    ("path", "message"),
    [("plan.txt", "must end in .png, .svg, .pdf"), ("no/such/plan.png", "there is no folder")],
)
def test_a_picture_that_cannot_be_written_is_refused_first(path: str, message: str, tmp_path: Path) -> None:
    result = verify("no-such-model", "--config-only", "--plot", str(tmp_path / path))
    assert result.returncode == 2
    assert message in result.stderr


def test_a_picture_without_matplotlib(script: Callable[[str], list[str]], tiny: Callable[..., Any]) -> None:
    program = script(
        "import sys; sys.modules['matplotlib'] = None; from paceline.launcher.__main__ import main; main()"
    )
    result = verify(str(tiny("qwen2").folder), "--config-only", "--plot", "plan.png", program=program)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line == "paceline: --plot needs matplotlib; install it with: pip install 'paceline[plot]'"


@pytest.mark.parametrize(
    ("text", "values"), [("4", (4,)), ("1..4", (1, 2, 3, 4)), ("1,2,8", (1, 2, 8)), ("2,1..3", (2, 1, 3))]
)
def test_numbers_of_ranks(text: str, values: tuple[int, ...]) -> None:
    assert parse_tp_range(text) == values


@pytest.mark.parametrize("text", ["", "0", "-1", "1..", "..4", "1...4", "1,,2", "x", "1_0", "4..2", "1..1000000", " 2"])
def test_numbers_that_name_no_ranks(text: str) -> None:
    with pytest.raises(InputError, match="--tp"):
        parse_tp_range(text)


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (["verify", "m", "--tp", "3"], 3),
        (["verify", "m"], 1),
        (["verify", "m", "--device", "cuda"], 1),
        (["verify", "m", "--tp", "1..4"], 1),
        (["verify", "m", "--tp=1,2"], 1),
        (["verify", "m", "--tp", "4", "--config-only"], 1),
        (["verify", "m", "--config-only"], 1),
    ],
)
def test_processes_that_are_started(arguments: list[str], ranks: int) -> None:
    assert number_of_ranks(arguments, lambda: 8) == ranks


def test_other_commands_take_one_number_of_ranks() -> None:
    with pytest.raises(InputError, match=r"--tp must be a whole number of at least 1, got '1\.\.4'"):
        number_of_ranks(["generate", "hi", "--tp", "1..4"], lambda: 8)
