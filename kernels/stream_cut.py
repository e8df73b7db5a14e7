"""How a streamed product (streamed_linear.py) is cut: one rule, so that few variants of its kernel serve a model.

The rule follows measurements on one H200 at 2 to 256 rows of Qwen3-0.6B's, Qwen3-8B's and Llama-3.2-1B's products
(docs/gpu-step.md).
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_ROWS = 2
BUCKETS = (8, 16, 32, 64, 128, 256)
"""Numbers of rows that there are variants for; the last of them is a gain for gated products alone."""
WEIGHT_ROWS = 64
"""Rows of the weight that a group of warps takes, half of them gate's and half up's where there is an activation."""
ALIGNMENT = 8
"""Elements: what the tensor memory accelerator asks of the inner dimension, and the turns of gate and up of columns."""

_RING_BYTES, _SHORT_RING_BYTES = 208 << 10, 104 << 10
"""Of weights and rows on their way: as much as a processor holds, or half of it.

With few rows and pieces half is enough, for each program has little to fetch, and it leaves room for the next kernel's
programs.
"""
_LEAST_STAGES = 3
_OTHER_BYTES = 8192
"""Of shared memory, beside the ring of tiles: for barriers, and for results to change places between threads."""
_MANY_GROUPS = 3
"""Of warps: all rows of x are on their way for each tile, so three in one fetch them a third as often."""
_LEAST_FILLED = 0.95


@dataclass(frozen=True)
class Cut:
    """How a product is cut: so many rows at the most, in steps of `inner`, of which `stages` are on their way.

    pieces: into how many the inner dimension is cut, a power of two. groups: of warps in a program, 1 or 3.
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
        return 128 if 2 * self.shared_bytes <= _RING_BYTES + 2 * _OTHER_BYTES else None


def bucket_of(num_rows: int) -> int:
    """The bucket of so many rows, a power of two; past the last of BUCKETS nothing is streamed."""
    return max(BUCKETS[0], 1 << (num_rows - 1).bit_length())


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
    if size % ALIGNMENT != 0 or (gated and num_columns % ALIGNMENT != 0) or (bucket == BUCKETS[-1] and not gated):
        return None
    tiles = num_tiles(num_columns, gated)
    # Programs that wait for each other's sums must all be running: a processor each. Two pieces gain nothing.
    pieces = next((pieces for pieces in (8, 4) if tiles * pieces <= processors), 1)
    large = num_tiles(num_columns, gated, _MANY_GROUPS)
    filled = large / (-(-large // processors) * processors)
    # Sums of 256 rows leave too few registers for three groups.
    groups = _MANY_GROUPS if filled >= _LEAST_FILLED and bucket < BUCKETS[-1] else 1
    inner = 128 if bucket <= 64 else 64
    ring_bytes = _SHORT_RING_BYTES if pieces > 1 and bucket <= 32 else _RING_BYTES
    stages = max(ring_bytes // _stage_bytes(bucket, inner, groups), _LEAST_STAGES)
    cut = Cut(bucket, inner, stages, pieces, groups)
    return cut if cut.shared_bytes <= shared_bytes else None


def _stage_bytes(rows: int, inner: int, groups: int) -> int:
    return 2 * inner * (rows + groups * WEIGHT_ROWS)
