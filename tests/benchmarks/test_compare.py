"""The comparison says who is ahead, by how much, and whether a target is reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare
import pytest
from compare_plot import draw_bars, draw_decode_steps

TARGET = {"W1_offline_out_tok_s": 160.0, "W2_b1_ms_per_tok": 2.5}


@pytest.fixture
def settings(tmp_path: Path) -> list[compare.Setting]:
    """Ours and one peer on a model with a target, and a peer alone on another model."""
    peers, results = tmp_path / "peers", tmp_path / "results"
    write(
        peers / "targets.json",
        models=[{"model": "small", "tp": 1, "floor": {"W2_b1_ms_per_tok": 1.0}, "target": TARGET}],
    )
    write(peers / "a.json", engine="nano-vllm", model="small", tp=1, W1_offline_out_tok_s=100.0, W2_b1_ms_per_tok=4.0)
    write(peers / "b.json", engine="nano-vllm", model="large", tp=2, W4_b8_ms_per_step=7.0)
    ours = {"W1_offline_out_tok_s": 150.0, "W2_b1_ms_per_tok": 2.0, "W4_b8_ms_per_step": 3.0, "W4_b32_ms_per_step": 5.0}
    write(results / "throughput_small_tp1.json", engine="paceline", model="small", tp=1, **ours)
    write(results / "cpu_generate.json", generate=[])
    return compare.read_settings(results, peers)


def write(path: Path, **content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def rows(settings: list[compare.Setting]) -> dict[tuple[str, str], dict[str, str]]:
    """The table's rows by workload and model, each by column."""
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in compare.table(settings)]
    return {(line[0][:3].strip(), line[1]): dict(zip(head, line, strict=True)) for line in lines}


def test_a_rate_and_a_time_are_compared_each_the_right_way(settings: list[compare.Setting]) -> None:
    table = rows(settings)
    rate, time = table["W1", "small, 1"], table["W2", "small, 1"]
    assert (rate["nano-vllm"], rate["times nano-vllm"]) == ("100.0", "1.50")
    assert (time["nano-vllm"], time["times nano-vllm"]) == ("4.00", "2.00")


def test_only_a_target_that_is_reached_is_bold(settings: list[compare.Setting]) -> None:
    table = rows(settings)
    assert (table["W1", "small, 1"]["to reach"], table["W1", "small, 1"]["paceline"]) == ("160.0", "150.0")
    assert (table["W2", "small, 1"]["to reach"], table["W2", "small, 1"]["paceline"]) == ("2.50", "**2.00**")


def test_what_is_not_known_is_left_empty(settings: list[compare.Setting]) -> None:
    table = rows(settings)
    assert table["W4", "large, 2"]["paceline"] == table["W4", "large, 2"]["times nano-vllm"] == ""
    assert {workload for workload, _ in table} == {"W1", "W2", "W4"}


def test_a_folder_without_targets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--peers"):
        compare.read_settings(tmp_path, tmp_path)


def test_the_pictures_are_drawn(settings: list[compare.Setting], tmp_path: Path) -> None:
    draw_bars(settings, compare.METRICS[:4], tmp_path / "bars.png")
    draw_decode_steps(settings, tmp_path / "steps.png")
    for name in ("bars.png", "steps.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_recorded_peers_can_be_read() -> None:
    found = compare.read_settings(compare.report.RESULTS, compare.PEERS)
    first = next(setting for setting in found if (setting.model, setting.tp) == ("qwen3-0.6b", 1))
    assert {"vllm 0.25.0", "nano-vllm"} <= set(first.engines)
    for metric in compare.METRICS:
        values = [figures[metric.key] for figures in first.engines.values()]
        assert all(compare.advantage(metric, value, first.floor[metric.key]) < 1 for value in values)
