"""A picture of the figures of decode_attention.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(results: dict[str, Any], path: Path) -> None:
    """One panel for each shape (rows) and batch (columns): time over context, and the time to read keys and values."""
    from matplotlib.figure import Figure

    figures = results["figures"]
    shapes = list(dict.fromkeys(figure["heads"] for figure in figures))
    batches = list(dict.fromkeys(figure["batch"] for figure in figures))
    ways = list(dict.fromkeys(figure["way"] for figure in figures))
    picture = Figure(figsize=(4.2 * len(batches), 3.2 * len(shapes) + 0.9), layout="constrained")
    panels = picture.subplots(len(shapes), len(batches), squeeze=False, sharex=True)
    for shape, row in zip(shapes, panels, strict=True):
        for batch, panel in zip(batches, row, strict=True):
            own = [figure for figure in figures if (figure["heads"], figure["batch"]) == (shape, batch)]
            for number, way in enumerate(ways):
                line = [(each["context"], each["ms"]) for each in own if each["way"] == way and each["ms"] is not None]
                panel.plot(*zip(*line, strict=True), marker="o", markersize=3, color=f"C{number}", label=way)
            floor = {each["context"]: each["ms"] * each["of_copy"] for each in own if each["ms"] is not None}
            panel.plot(list(floor), list(floor.values()), color="0.5", linestyle=":", label="reading at copy speed")
            panel.set(yscale="log", title=f"heads {shape}, {batch} request{'s' if batch > 1 else ''}")
            panel.set_xscale("log", base=2)
            panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("context, tokens")
    for row in panels:
        row[0].set_ylabel("ms a layer")
    picture.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ways) + 1, fontsize=9
    )
    picture.suptitle("Attention of one decode step, one layer (query heads / KV heads / head size)")
    picture.savefig(path, dpi=130)
