"""A picture of the figures of prefill_attention.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(results: dict[str, Any], path: Path) -> None:
    """One panel for each shape of heads: rate over the length of a single prompt, and the matrix product's rate."""
    from matplotlib.figure import Figure

    figures = [figure for figure in results["figures"] if figure["prompts"] == 1]
    shapes = list(dict.fromkeys(figure["heads"] for figure in figures))
    ways = list(dict.fromkeys(figure["way"] for figure in figures))
    picture = Figure(figsize=(4.8 * len(shapes), 4.4), layout="constrained")
    panels = picture.subplots(1, len(shapes), squeeze=False, sharey=True)[0]
    for shape, panel in zip(shapes, panels, strict=True):
        own = [figure for figure in figures if figure["heads"] == shape]
        for number, way in enumerate(ways):
            line = [(each["length"], each["tflop_s"]) for each in own if each["way"] == way]
            panel.plot(*zip(*line, strict=True), marker="o", markersize=3, color=f"C{number}", label=way)
        panel.axhline(results["ceiling_tflop_s"], color="0.5", linestyle=":", label="matrix product")
        panel.set(title=f"heads {shape}", xlabel="prompt, tokens", ylim=(0, None))
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("TFLOP/s")
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ways) + 1, fontsize=9)
    picture.suptitle("Causal attention of one prompt, one layer (query heads / KV heads / head size)")
    picture.savefig(path, dpi=130)
