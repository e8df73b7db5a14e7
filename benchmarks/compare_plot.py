"""Pictures of compare.py's figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compare import Metric, Setting
    from matplotlib.axes import Axes

COLOURS = {"paceline": "C3", "vllm 0.25.0": "C0", "nano-vllm": "C2"}
BATCH_KEY = re.compile(r"W4_b(\d+)_ms_per_step")


def draw_bars(settings: Sequence[Setting], metrics: Sequence[Metric], path: Path) -> None:
    """One panel a metric: a group of bars for each model and number of ranks, with its floor and target."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(1.9 * len(settings) + 2, 3.0 * len(metrics)), layout="constrained")
    panels = picture.subplots(len(metrics), 1, squeeze=False)[:, 0]
    for metric, panel in zip(metrics, panels, strict=True):
        shown = [s for s in settings if any(metric.key in figures for figures in s.engines.values())]
        for place, setting in enumerate(shown):
            _draw_group(panel, place, setting, metric.key)
        panel.set_xticks(range(len(shown)), [f"{s.model}\n{s.tp} GPU{'s' if s.tp > 1 else ''}" for s in shown])
        panel.set_title(f"{metric.label} ({'higher' if metric.higher_is_better else 'lower'} is better)", fontsize=11)
        panel.set_yscale("log")
        panel.grid(axis="y", alpha=0.3)
    _add_legend(panels)
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
        for name, bound, style in (("to reach", setting.target, "--"), ("floor", setting.floor, ":")):
            if steps := _decode_steps(bound):
                panel.plot(*zip(*steps, strict=True), color="0.4", linestyle=style, label=name)
        panel.set_xscale("log", base=2)
        panel.set(ylim=(0, None), xlabel="requests at once", ylabel="ms a step")
        panel.set_title(f"{setting.model}, {setting.tp} GPU{'s' if setting.tp > 1 else ''}", fontsize=11)
        panel.grid(alpha=0.3)
    _add_legend(panels[: len(settings)])
    picture.savefig(path, dpi=130)


def _draw_group(panel: Axes, place: int, setting: Setting, key: str) -> None:
    """The bars of one model; every engine has its own place in the group, there or not."""
    width = 0.8 / len(COLOURS)
    for number, (engine, colour) in enumerate(COLOURS.items()):
        value = setting.engines.get(engine, {}).get(key)
        if value is not None:
            left = place - 0.4 + number * width
            bar = panel.bar(left, value, width, align="edge", color=colour, label=engine)
            panel.bar_label(bar, fmt=lambda height: f"{height:,.4g}", fontsize=7)
    for name, bound, style in (("to reach", setting.target, "--"), ("floor", setting.floor, ":")):
        if key in bound:
            panel.hlines(bound[key], place - 0.42, place + 0.42, color="0.2", linestyle=style, label=name)


def _decode_steps(figures: Mapping[str, Any]) -> list[tuple[int, float]]:
    """(requests, ms) of the W4 figures, by number of requests."""
    return sorted((int(match[1]), value) for key, value in figures.items() if (match := BATCH_KEY.fullmatch(key)))


def _add_legend(panels: Sequence[Axes]) -> None:
    """One legend, in the first panel, of all that any panel shows."""
    entries = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    panels[0].legend(entries.values(), entries.keys(), fontsize=8)
