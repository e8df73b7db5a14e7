"""Pictures of compare.py's figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compare import Metric, Setting
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"paceline": "C3", "vllm 0.25.0": "C0", "nano-vllm": "C2"}
BOUNDS = (("to reach", "target", "--"), ("bound by bytes and operations", "floor", ":"))
"""Name, field of a Setting, and style of a line."""
BATCH_KEY = re.compile(r"W4_b(\d+)_ms_per_step")


def draw_bars(settings: Sequence[Setting], metrics: Sequence[Metric], path: Path) -> None:
    """A small panel for each metric (rows) and model with its number of ranks (columns), engines as bars."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(2.1 * len(settings), 2.3 * len(metrics) + 0.8), layout="constrained")
    panels = picture.subplots(len(metrics), len(settings), squeeze=False)
    for metric, row in zip(metrics, panels, strict=True):
        for setting, panel in zip(settings, row, strict=True):
            _draw_bars(panel, setting, metric.key)
        better = "higher" if metric.higher_is_better else "lower"
        row[0].set_ylabel(f"{metric.label}\n{better} is better", fontsize=8)
    for setting, panel in zip(settings, panels[0], strict=True):
        panel.set_title(_title(setting), fontsize=9)
    _add_legend(picture, panels.flatten())
    picture.savefig(path, dpi=130)


def draw_decode_steps(settings: Sequence[Setting], path: Path) -> None:
    """One panel a model and number of ranks: time of a decode step over the number of requests."""
    from matplotlib.figure import Figure

    settings = [s for s in settings if any(_decode_steps(figures) for figures in s.engines.values())]
    columns = min(3, len(settings))
    rows = -(-len(settings) // columns)
    picture = Figure(figsize=(4.2 * columns, 3.4 * rows), layout="constrained")
    panels = picture.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels[len(settings) :]:
        panel.remove()
    for setting, panel in zip(settings, panels, strict=False):
        for engine, figures in setting.engines.items():
            if steps := _decode_steps(figures):
                panel.plot(*zip(*steps, strict=True), marker="o", color=COLOURS.get(engine), label=engine)
        for name, bound, style in BOUNDS:
            if steps := _decode_steps(getattr(setting, bound)):
                panel.plot(*zip(*steps, strict=True), color="0.4", linestyle=style, label=name)
        panel.set_xscale("log", base=2)
        panel.set(ylim=(0, None), xlabel="requests at once", ylabel="ms a step")
        panel.set_title(_title(setting), fontsize=11)
        panel.grid(alpha=0.3)
    _add_legend(picture, panels[: len(settings)])
    picture.savefig(path, dpi=130)


def number(value: float | None) -> str:
    """Three digits or so, thousands as k; empty where nothing is known."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value / 1000:.0f}k" if value >= 100_000 else f"{value / 1000:.1f}k"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _draw_bars(panel: Axes, setting: Setting, key: str) -> None:
    """One metric of one model; every engine has its own place, there or not."""
    for place, (engine, colour) in enumerate(COLOURS.items()):
        value = setting.engines.get(engine, {}).get(key)
        if value is not None:
            panel.bar_label(panel.bar(place, value, 0.8, color=colour, label=engine), fmt=number, fontsize=8)
    for name, bound, style in BOUNDS:
        if key in (values := getattr(setting, bound)):
            panel.axhline(values[key], color="0.2", linestyle=style, linewidth=1, label=name)
    panel.set(xlim=(-0.6, len(COLOURS) - 0.4), xticks=[])
    panel.margins(y=0.15)
    panel.tick_params(axis="y", labelsize=7)


def _title(setting: Setting) -> str:
    return f"{setting.model}, {setting.tp} GPU{'s' if setting.tp > 1 else ''}"


def _decode_steps(figures: Mapping[str, Any]) -> list[tuple[int, float]]:
    """(requests, ms) of the W4 figures, by number of requests."""
    return sorted((int(match[1]), value) for key, value in figures.items() if (match := BATCH_KEY.fullmatch(key)))


def _add_legend(picture: Figure, panels: Iterable[Axes]) -> None:
    """One legend, below, of all that any panel shows."""
    entries: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    names = [name for name in (*COLOURS, *(name for name, _, _ in BOUNDS)) if name in entries]
    picture.legend([entries[name] for name in names], names, loc="outside lower center", ncols=len(names), fontsize=9)
