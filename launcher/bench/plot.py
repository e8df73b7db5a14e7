"""A picture of a run: how latencies are distributed, and what came when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.coordinator.errors import InputError
from paceline.launcher.bench.records import RequestRecord
from paceline.launcher.bench.statistics import latencies, percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
_INK, _SOFT, _GRID = "#1f2933", "#66727f", "#e3e7eb"
_LINE, _LIMIT, _SECOND = "#2563a8", "#c2410c", "#8a6d1f"
_MOST_POINTS = 2000
"""Of a curve: more are not to be seen."""


def check_plot(path: Path) -> None:
    """Raise InputError where draw could not write such a file, before long work is done for it."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"--plot {path} must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError("--plot needs matplotlib; install it with: pip install 'paceline[plot]'") from error


def draw(title: str, records: Sequence[RequestRecord], slo: Mapping[str, float], path: Path) -> None:
    """Cumulative distributions of TTFT, ITL and E2E with their limits, and tokens and running requests over time."""
    from matplotlib.figure import Figure

    whole = [values for record in records if (values := latencies(record)) is not None]
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    figure.suptitle(title, fontsize=11, color=_INK, x=0.01, ha="left")
    panels = figure.subplot_mosaic([["ttft", "itl", "e2e"], ["time", "time", "time"]], height_ratios=[1, 0.9])
    curves = {
        "ttft": ("time to first token", [values.ttft for values in whole]),
        "itl": ("time between tokens", [gap for values in whole for gap in values.gaps]),
        "e2e": ("whole answer", [values.e2e for values in whole]),
    }
    for key, (name, seconds) in curves.items():
        _draw_distribution(panels[key], name, seconds, slo.get(key))
    panels["ttft"].set_ylabel("share", fontsize=9, color=_SOFT)
    _draw_time(panels["time"], records)
    figure.savefig(path, dpi=130)


def _draw_distribution(axes: Axes, name: str, seconds: Sequence[float], limit: float | None) -> None:
    _style(axes, name)
    axes.set_ylim(0, 1.02)
    if not seconds:
        axes.text(0.5, 0.5, "no answers", ha="center", va="center", color=_SOFT, transform=axes.transAxes)
        axes.set_xticks([])
        return
    ordered = sorted(seconds)
    in_seconds = ordered[-1] >= 10
    factor = 1.0 if in_seconds else 1000.0
    count = min(len(ordered), _MOST_POINTS)
    shares = [place / max(count - 1, 1) for place in range(count)]
    axes.plot([percentile(ordered, share * 100) * factor for share in shares], shares, color=_LINE, linewidth=1.8)
    words = []
    for q in (50, 90, 99):
        value = percentile(ordered, q) * factor
        axes.plot([value], [q / 100], "o", color=_LINE, markersize=4)
        words.append(f"p{q}  {value:,.{0 if value >= 100 else 1}f}")
    if limit is not None:
        axes.axvline(limit * factor, color=_LIMIT, linewidth=1, linestyle=(0, (4, 3)))
        within = sum(value <= limit for value in ordered) / len(ordered)
        words.append(f"{within:.1%} within {limit * factor:g}")
    axes.text(
        0.97,
        0.05,
        "\n".join(words),
        ha="right",
        fontsize=8,
        color=_INK,
        linespacing=1.5,
        transform=axes.transAxes,
        bbox={"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": _GRID, "alpha": 0.9},
    )
    axes.set_xlim(left=0)
    axes.set_xlabel("s" if in_seconds else "ms", fontsize=9, color=_SOFT)


def _draw_time(axes: Axes, records: Sequence[RequestRecord]) -> None:
    _style(axes, "over time")
    end = max(
        (max(record.ended or 0.0, *record.times[-1:], 0.0) for record in records if record.sent is not None),
        default=0.0,
    )
    if end == 0:
        return
    width = _bin_seconds(end)
    bins = int(end / width) + 1
    tokens, running = [0.0] * bins, [0.0] * bins
    for record in records:
        if record.sent is None:
            continue
        for time, count in zip(record.times, record.token_counts(), strict=True):
            tokens[int(time / width)] += count / width
        last = end if record.ended is None else record.ended
        for place in range(int(record.sent / width), int(last / width) + 1):
            running[place] += max(0.0, min(last, (place + 1) * width) - max(record.sent, place * width)) / width
    starts = [place * width for place in range(bins + 1)]
    axes.stairs(tokens, starts, fill=True, color=_LINE, alpha=0.25, linewidth=0)
    axes.stairs(tokens, starts, color=_LINE, linewidth=1.4)
    axes.set_xlim(0, bins * width)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("s since the start", fontsize=9, color=_SOFT)
    axes.set_ylabel("output tokens/s", fontsize=9, color=_LINE)
    other = axes.twinx()
    other.plot([(place + 0.5) * width for place in range(bins)], running, color=_SECOND, linewidth=1.4)
    other.set_ylim(bottom=0)
    other.set_ylabel("running requests", fontsize=9, color=_SECOND)
    other.tick_params(labelsize=8, colors=_SOFT, length=0)
    other.spines[:].set_visible(False)
    for failed in (record.ended for record in records if record.error is not None and record.ended is not None):
        axes.axvline(failed, ymax=0.04, color=_LIMIT, linewidth=1)


def _bin_seconds(end: float) -> float:
    """A round width that cuts a run into 60 parts at most."""
    for width in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300):
        if end / width <= 60:
            return width
    return end / 60


def _style(axes: Axes, name: str) -> None:
    axes.set_title(name, fontsize=10, color=_INK, loc="left")
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_SOFT, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
