"""How a streamed product (streamed_linear.py) is cut: one rule, so that few variants of its kernel serve a model.

The rule follows measurements on one H200 at 1 to 256 rows of Qwen3-0.6B's, Qwen3-8B's and Llama-3.2-1B's products
(docs/gpu-step.md).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

BUCKETS = (1, 8, 16, 32, 64, 128, 192, 256)
"""Numbers of rows that products are cut for."""
WEIGHT_ROWS = 64
"""Rows of the weight that a group of warps takes, half of them gate's and half up's where there is an activation."""
_INNER_ALIGNMENT = 8
"""Elements: what the tensor memory accelerator asks of the inner dimension."""
_COLUMN_ALIGNMENT = 16
"""Columns that are fetched together (streamed_results.py)."""

_RING_BYTES, _SHORT_RING_BYTES = 208 << 10, 104 << 10
"""Of weights and rows on their way: as much as a processor holds, or half of it.

With few rows and pieces half is enough, for each program has little to fetch, and it leaves room for the next kernel's
programs.
"""
_LEAST_STAGES = 3
_OTHER_BYTES = 4096
"""Of shared memory, beside the ring of tiles, for barriers, scales and sums over warps."""
_MANY_GROUPS = 3
"""Of warps: all rows of x are on their way for each tile, so three in one fetch them a third as often."""
_LEAST_FILLED = 0.95
_MANY_ROWS, _SOME_ROWS, _FEW_ROWS, _LEAST_ROWS = 128, 64, 32, 8
"""Rows of x that a program takes at the most, preferably, where tiles would be too few, and what tensor cores take."""
MOST_ROWS_OF_PIECES = _SOME_ROWS
"""Rows of x, all in one tile, up to which the inner dimension may be cut."""
_LEAST_SPREAD = 0.45
"""Of the processors that should have a tile: fewer are worse than more tiles that fetch the same weights again."""


@dataclass(frozen=True)
class Cut:
    """How a product is cut: in tiles of so many rows of x, in steps of `inner`, of which `stages` are on their way.

    pieces: into how many the inner dimension is cut, a power of two; more than one if there is one tile of rows.
    groups: of warps in a program, 1 or 3.
    """

    rows: int
    inner: int
    stages: int
    pieces: int = 1
    groups: int = 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a program takes, at the most."""
        return self.stages * _stage_bytes(self.rows, self.inner, self.groups) + _OTHER_BYTES

    @property
    def max_registers(self) -> int | None:
        """Of a thread, so that two programs find room where shared memory has room for two; None: what there is."""
        return 128 if 2 * self.shared_bytes <= _RING_BYTES else None


def bucket_of(num_rows: int) -> int | None:
    """The bucket of so many rows; None past the last of BUCKETS, where nothing is streamed."""
    index = bisect.bisect_left(BUCKETS, num_rows)
    return BUCKETS[index] if index < len(BUCKETS) else None


def num_tiles(num_columns: int, gated: bool, groups: int = 1) -> int:
    """Tiles that so many columns of the result take."""
    return -(-num_columns // (columns_of_group(gated) * groups))


def columns_of_group(gated: bool) -> int:
    """Columns of the result that a group's rows of the weight give."""
    return WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS


def cut_product(
    num_columns: int, size: int, bucket: int, *, gated: bool, processors: int, shared_bytes: int
) -> Cut | None:
    """The cut of a product [bucket, size] x [size, num_columns], or None where it cannot or should not be streamed.

    gated: of two such products, gate and up. processors, shared_bytes (of one program): the GPU's.
    """
    if size % _INNER_ALIGNMENT != 0 or num_columns % _COLUMN_ALIGNMENT != 0:
        return None
    tiles = num_tiles(num_columns, gated)
    rows = _rows_of_tile(tiles, bucket, processors)
    pieces = 1
    if bucket <= rows <= MOST_ROWS_OF_PIECES:
        # Programs that wait for each other's sums must all be running: a processor each. Two pieces gain nothing.
        pieces = next((pieces for pieces in (8, 4) if tiles * pieces <= processors), 1)
    large = num_tiles(num_columns, gated, _MANY_GROUPS)
    filled = large / (-(-large // processors) * processors)
    groups = _MANY_GROUPS if filled >= _LEAST_FILLED else 1
    inner = 128 if rows <= _SOME_ROWS else 64
    ring_bytes = _SHORT_RING_BYTES if pieces > 1 and rows <= _FEW_ROWS else _RING_BYTES
    stages = max(ring_bytes // _stage_bytes(rows, inner, groups), _LEAST_STAGES)
    cut = Cut(rows, inner, stages, pieces, groups)
    return cut if cut.shared_bytes <= shared_bytes else None


def _rows_of_tile(tiles: int, bucket: int, processors: int) -> int:
    """Rows of x that a program takes, where so many tiles of the weight's rows are needed for all columns.

    Tiles of other rows have the same weights come from the L2 cache once more, but keep processors busy that had none.
    """

    def programs(rows: int) -> int:
        return tiles * -(-bucket // rows)

    if bucket <= _FEW_ROWS:
        return max(bucket, _LEAST_ROWS)
    if programs(_SOME_ROWS) > processors:
        # Tiles of 128 rows that are not full are the better ones only where all of them are at work at once.
        full = bucket % _MANY_ROWS == 0
        return _MANY_ROWS if full or programs(_MANY_ROWS) <= processors else _SOME_ROWS
    least = _LEAST_SPREAD * processors
    if programs(_SOME_ROWS) >= least:
        return _SOME_ROWS
    # Where all rows are one tile, the inner dimension can be cut instead.
    return _FEW_ROWS if bucket > _SOME_ROWS or programs(_FEW_ROWS) >= least else _SOME_ROWS


def _stage_bytes(rows: int, inner: int, groups: int) -> int:
    return 2 * inner * (rows + groups * WEIGHT_ROWS)
