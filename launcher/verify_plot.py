"""A picture of a plan: which slice of which matrix sits on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.coordinator.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from paceline.worker.verification import ShardReport

SUFFIXES = (".png", ".svg", ".pdf")
_PANEL_INCHES = 1.45
_COLOURS = 10


@dataclass(frozen=True)
class _Block:
    """Part of a matrix along the dimension that is cut, and the ranks that hold it."""

    ranks: Sequence[int]
    length: int
    padding: int


@dataclass(frozen=True)
class _Matrix:
    """One matrix of the checkpoint and how ranks share it."""

    label: str
    shape: tuple[int, ...]
    dim: int
    blocks: Sequence[_Block]


def check_plot(path: Path) -> None:
    """Raise InputError where draw could not write such a file, before long work is done for it."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"--plot {path} must end in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.absolute().parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError("--plot needs matplotlib; install it with: pip install 'paceline[plot]'") from error


def draw(title: str, reports: Sequence[ShardReport], path: Path) -> None:
    """One row of panels for each number of ranks, one panel for each matrix of a layer; layers are all alike.

    A matrix is drawn as the checkpoint stores it, one row an output, all matrices to the same size. Where several ranks
    hold the same rows, they lie side by side. Padding follows the last real element of its rank.
    """
    from matplotlib.figure import Figure

    rows = [_matrices(report) for report in reports]
    columns = max(map(len, rows))
    size = (_PANEL_INCHES * columns + 0.8, (_PANEL_INCHES + 0.6) * len(rows) + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for report, matrices, row in zip(reports, rows, axes, strict=True):
        for matrix, panel in zip(matrices, row, strict=True):
            _draw_matrix(panel, matrix, report.plan.tp)
        tp = report.plan.tp
        row[0].set_ylabel(f"{tp} rank{'s' if tp > 1 else ''}", fontsize=11, fontweight="bold")
    figure.suptitle(f"{title}: which rank holds which slice (numbers are ranks, hatched is padding)", fontsize=11)
    figure.savefig(path, dpi=150)


def _matrices(report: ShardReport) -> list[_Matrix]:
    """The matrices outside the layers and those of the first layer."""
    matrices = []
    for parameter in report.plan.parameters:
        if len(parameter.shape) != 2 or (".layers." in parameter.name and ".layers.0." not in parameter.name):
            continue
        for shard_id, first in parameter.shards[0].items():
            spans = [by_id[shard_id].span for by_id in parameter.shards]
            # Ranks with nothing come last, each by itself.
            keys = [(span.start, 0 if span.length else 1 + rank) for rank, span in enumerate(spans)]
            blocks = []
            for key in sorted(set(keys)):
                ranks = [rank for rank, other in enumerate(keys) if other == key]
                span = spans[ranks[0]]
                blocks.append(_Block(ranks, span.length, span.padded - span.length))
            label = f"{shard_id}_proj" if shard_id else parameter.name.split(".")[-2]
            matrices.append(_Matrix(label, first.full_shape, first.dim, blocks))
    return matrices


def _draw_matrix(panel: Axes, matrix: _Matrix, tp: int) -> None:
    """One panel: blocks one after the other along the dimension that is cut, scaled to a unit square."""
    extent = sum(block.length + block.padding for block in matrix.blocks)
    start = 0.0
    for block in matrix.blocks:
        held, padded = start + block.length / extent, start + (block.length + block.padding) / extent
        for number, rank in enumerate(block.ranks):
            across = (number / len(block.ranks), (number + 1) / len(block.ranks))
            _draw_part(panel, matrix.dim, (start, held), across, _colour(rank), hatch=None)
            _draw_part(panel, matrix.dim, (held, padded), across, "white", hatch="////")
            middle = ((start + (held if block.length else padded)) / 2, sum(across) / 2)
            x, y = middle if matrix.dim == 1 else middle[::-1]
            background = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
            panel.text(x, y, str(rank), ha="center", va="center", fontsize=8 if tp <= 8 else 5, bbox=background)
        start = padded
    panel.set(xlim=(-0.02, 1.02), ylim=(1.02, -0.02), aspect="equal", xticks=[], yticks=[])
    panel.spines[:].set_visible(False)
    panel.set_title(matrix.label, fontsize=9)
    padding = sum(block.padding * len(block.ranks) for block in matrix.blocks)
    share = padding / sum((block.length + block.padding) * len(block.ranks) for block in matrix.blocks)
    caption = " x ".join(f"{size:,}" for size in matrix.shape)
    panel.set_xlabel(caption + (f"\n{share:.0%} padding" if padding else ""), fontsize=7)


def _draw_part(
    panel: Axes, dim: int, along: tuple[float, float], across: tuple[float, float], colour: str, hatch: str | None
) -> None:
    """A rectangle; `along` is the dimension that is cut, rows (0) from top to bottom or columns (1) to the right."""
    from matplotlib.patches import Rectangle

    if along[0] == along[1]:
        return
    (left, right), (top, bottom) = (along, across) if dim == 1 else (across, along)
    edge = "0.5" if hatch else "white"
    panel.add_patch(
        Rectangle((left, top), right - left, bottom - top, facecolor=colour, edgecolor=edge, linewidth=0.8, hatch=hatch)
    )


def _colour(rank: int) -> str:
    """One of matplotlib's default colours; they repeat after the tenth rank."""
    return f"C{rank % _COLOURS}"
