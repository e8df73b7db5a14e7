"""Matrix products of some ten to some hundred rows with a large weight, where a library leaves the GPU waiting.

Up to a few hundred rows such a product is still little more than a stream of the weight, and short: what a library's
kernel loses is the time until its first weights arrive, and the activation is another kernel's. This one starts while
the kernel before still runs (programmatic dependent launch), asks for its weights before it waits for its input, and
computes a gated activation on the way. Which tile is the fastest, and whether any beats the library, is measured:
worker/product_tuning.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.launch import dependent_launch, launch

MIN_BUCKET, MAX_BUCKET = 16, 256
LINE = tl.constexpr(64)
"""Elements of 16 bits in a line of the L2 cache."""
LINES_AT_ONCE = tl.constexpr(16)
MOST_PREFETCHED = tl.constexpr(4096)
"""Elements of each weight row that are asked for ahead."""


@dataclass(frozen=True)
class Tile:
    """What one program computes: so many rows and columns, in steps of `inner`, with `stages` steps on their way."""

    rows: int
    columns: int
    inner: int
    stages: int
    warps: int

    def shared_bytes(self, gated: bool) -> int:
        """Shared memory that a program takes, at the most."""
        columns = 2 * self.columns if gated else self.columns
        return 2 * self.stages * self.inner * (self.rows + columns)


Tiles = Mapping[int, Tile]
"""A tile for each bucket of rows; buckets that are absent are the library's."""

_CANDIDATES = {
    16: (Tile(16, 16, 256, 3, 4), Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4)),
    32: (Tile(32, 16, 256, 3, 4), Tile(32, 32, 128, 4, 4), Tile(32, 64, 128, 4, 4)),
    64: (Tile(64, 32, 128, 4, 4), Tile(64, 64, 128, 3, 4), Tile(64, 128, 64, 4, 8)),
    128: (Tile(64, 64, 128, 3, 4), Tile(128, 64, 64, 4, 4), Tile(128, 128, 64, 4, 8)),
    256: (Tile(128, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 4, 8)),
}


def bucket_of(num_rows: int) -> int:
    """The bucket of so many rows, a power of two; above MAX_BUCKET there are no tiles."""
    return max(MIN_BUCKET, 1 << (num_rows - 1).bit_length())


def candidate_tiles(bucket: int) -> tuple[Tile, ...]:
    """The tiles worth measuring for a bucket of rows."""
    return _CANDIDATES[bucket]


def tile_of(x: torch.Tensor, tiles: Tiles) -> Tile | None:
    """The tile for x [T, K]; None where the library does it."""
    if not tiles or not x.is_cuda or x.shape[0] == 0:
        return None
    return tiles.get(bucket_of(x.shape[0]))


def tiled_linear(
    x: torch.Tensor, weight: torch.Tensor, tile: Tile, *, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """Return x [T, K] times the transpose of weight [N, K] plus bias [N]: [T, N], accumulated in float32.

    gated: weight is [2 * N, K] and the result silu(x @ weight[:N].T) * (x @ weight[N:].T), without bias.
    All of one 16-bit type, contiguous.
    """
    num_rows, size = x.shape
    num_columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    pdl = dependent_launch(x.device)
    launch(
        _tiled_kernel,
        (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_columns, tile.columns)),
        x,
        weight,
        x if bias is None else bias,
        out,
        num_rows,
        num_columns,
        size,
        tile.rows,
        tile.columns,
        tile.inner,
        tile.stages,
        size % tile.inner == 0,
        gated,
        bias is not None,
        pdl,
        not x.is_cuda,
        num_warps=tile.warps,
        dependent=pdl,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _tiled_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    size: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """BLOCK_M rows and BLOCK_N columns; programs of the same columns follow each other, and find the weight in L2."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies past the end is computed from the last row and column, and not stored.
    safe_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    safe_columns = tl.minimum(columns, num_columns - 1).to(tl.int64)
    weight_rows = weight_ptr + safe_columns[:, None] * size
    up_rows = weight_rows + num_columns.to(tl.int64) * size
    x_rows = x_ptr + safe_rows[:, None] * size
    if PDL:
        gdc_launch_dependents()
        _prefetch(weight_rows, size)
        if GATED:
            _prefetch(up_rows, size)
        gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in tl.range(0, size, BLOCK_K, num_stages=STAGES):
        inner = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.permute(_load_inner(x_rows, inner, size, WHOLE), (1, 0))
        acc = _dot(_load_inner(weight_rows, inner, size, WHOLE), x, acc, UPCAST)
        if GATED:
            acc_up = _dot(_load_inner(up_rows, inner, size, WHOLE), x, acc_up, UPCAST)
    if BIAS:
        acc += tl.load(bias_ptr + safe_columns).to(tl.float32)[:, None]
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    out = rows.to(tl.int64)[None, :] * num_columns + columns[:, None]
    real = (rows < num_rows)[None, :] & (columns < num_columns)[:, None]
    tl.store(out_ptr + out, acc.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _load_inner(rows_ptr: tl.tensor, inner: tl.tensor, size: tl.tensor, WHOLE: tl.constexpr) -> tl.tensor:
    """Elements [rows, BLOCK_K] of rows at rows_ptr [rows, 1]; unless all are whole, zero from size on."""
    return tl.load(rows_ptr + inner) if WHOLE else tl.load(rows_ptr + inner, mask=inner < size, other=0.0)


@triton.jit
def _dot(weight: tl.tensor, x: tl.tensor, acc: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """The weight comes first: tensor cores take at least 16 rows of the first matrix, but 8 columns of the second."""
    if UPCAST:
        weight = weight.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(weight, x, acc)


@triton.jit
def _prefetch(rows_ptr: tl.tensor, size: tl.tensor) -> None:
    """Ask for the first MOST_PREFETCHED elements of rows at rows_ptr [rows, 1] to be brought to the L2 cache."""
    for start in range(0, tl.minimum(size, MOST_PREFETCHED), LINES_AT_ONCE * LINE):
        inner = tl.minimum(start + tl.arange(0, LINES_AT_ONCE) * LINE, size - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(rows_ptr + inner[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
