"""Our recorded throughput beside other engines' on the same workloads: a Markdown table, and pictures of it.

    ./launch.sh bench compare [--peers DIR] [--write]

Reads benchmarks/results/throughput_*.json and the peers' files, and runs nothing. --write draws docs/throughput.png and
docs/decode-step.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from compare_plot import draw_bars, draw_decode_steps, number

PEERS = report.ROOT / "benchmarks" / "peers"
TARGETS = "targets.json"
OURS = "paceline"


@dataclass(frozen=True)
class Metric:
    """One figure of the workloads."""

    key: str
    label: str
    higher_is_better: bool = False


METRICS = (
    Metric("W1_offline_out_tok_s", "W1 offline, output tok/s", higher_is_better=True),
    Metric("W2_b1_ms_per_tok", "W2 one request, ms a token"),
    Metric("W3_prefill_tok_s", "W3 prefill, tok/s", higher_is_better=True),
    Metric("W3b_ttft_1024_ms", "W3b first token of 1,024, ms"),
    *(Metric(f"W4_b{batch}_ms_per_step", f"W4 step of {batch}, ms") for batch in (8, 32, 128, 256)),
)


@dataclass
class Setting:
    """One model at one number of ranks: what engines reach, and what bounds them."""

    model: str
    tp: int
    engines: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Figures by engine."""
    floor: Mapping[str, float] = field(default_factory=dict)
    """What no engine can beat by much."""
    target: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As in a table."""
        return f"{self.model}, {self.tp}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder of the other engines' files")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of ours")
    parser.add_argument("--write", action="store_true", help="draw the pictures under docs/")
    arguments = parser.parse_args()
    settings = read_settings(arguments.results, arguments.peers)
    print("\n".join(table(settings)))
    if arguments.write:
        draw_bars(settings, METRICS[:4], report.ROOT / "docs" / "throughput.png")
        draw_decode_steps(settings, report.ROOT / "docs" / "decode-step.png")


def read_settings(results: Path, peers: Path) -> list[Setting]:
    """All models and numbers of ranks that any file speaks of, the targets' models first and in their order.

    Raises SystemExit where the peers' folder has no targets' file.
    """
    if not (peers / TARGETS).is_file():
        raise SystemExit(f"{peers} has no {TARGETS}; name the folder of the peers' figures with --peers")
    found: dict[tuple[str, int], Setting] = {}
    for each in json.loads((peers / TARGETS).read_text())["models"]:
        key = each["model"], each["tp"]
        found[key] = Setting(*key, floor=each["floor"], target=each["target"])
    for path in [*sorted(peers.glob("*.json")), *sorted(results.glob("throughput_*.json"))]:
        if path.name != TARGETS:
            figures = json.loads(path.read_text())
            key = figures["model"], figures["tp"]
            found.setdefault(key, Setting(*key)).engines[figures["engine"]] = figures
    models = [model for model, _ in found]
    return sorted(found.values(), key=lambda setting: (models.index(setting.model), setting.tp))


def table(settings: Iterable[Setting]) -> Iterator[str]:
    """Lines of a Markdown table; our figure is bold where it reaches the target."""
    settings = list(settings)
    others = other_engines(settings)
    columns = ["workload", "model, ranks", "floor", *others, "to reach", OURS, *(f"times {other}" for other in others)]
    yield "| " + " | ".join(columns) + " |"
    yield "|---|---|" + "---:|" * (len(columns) - 2)
    for metric in METRICS:
        for setting in settings:
            values = {engine: figures.get(metric.key) for engine, figures in setting.engines.items()}
            if all(value is None for value in values.values()):
                continue
            ours, target = values.get(OURS), setting.target.get(metric.key)
            shown = number(ours)
            if ours is not None and target is not None and advantage(metric, ours, target) >= 1:
                shown = f"**{shown}**"
            cells = [metric.label, setting.name, number(setting.floor.get(metric.key))]
            cells += [number(values.get(other)) for other in others]
            cells += [number(target), shown]
            cells += [times(metric, ours, values.get(other)) for other in others]
            yield "| " + " | ".join(cells) + " |"


def other_engines(settings: Iterable[Setting]) -> list[str]:
    """Names of the engines that are not ours, each once, vLLM before nano-vllm."""
    return sorted({engine for setting in settings for engine in setting.engines} - {OURS}, reverse=True)


def advantage(metric: Metric, ours: float, other: float) -> float:
    """How many times as good as another figure ours is."""
    return ours / other if metric.higher_is_better else other / ours


def times(metric: Metric, ours: float | None, other: float | None) -> str:
    """The advantage for a table."""
    return "" if ours is None or other is None else f"{advantage(metric, ours, other):.2f}"


if __name__ == "__main__":
    main()
