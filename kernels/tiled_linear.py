"""Products of many rows, as prompts have, together with what follows them, on Hopper GPUs, in Gluon.

The library multiplies as fast, but hands the results to a kernel that reads them from memory and writes them again: for
the activation of gate and up, and for norm, rotation and storing of queries, keys and values. Here that is done on the
sums in registers, by half of the warps while the others multiply.
"""

from __future__ import annotations

import torch

from paceline.kernels.launch import is_hopper, launch, num_processors
from paceline.kernels.rotary_and_store import HeadPlaces
from paceline.kernels.tensor_descriptors import TensorDescriptor, describe
from paceline.kernels.tiled_kernel import (
    GROUP_ROWS,
    GROUPS,
    INNER,
    TURN,
    tiled_gated_kernel,
    tiled_heads_kernel,
)

MIN_ROWS = 129
"""Of fewer rows a product is a stream of the weight (streamed_linear.py)."""
_ROWS = GROUPS * GROUP_ROWS
_BAND = 12
"""Rows of tiles that are gone through together."""
_TILING = 128, 6
"""Rows of the weight in a tile, and stages of the ring."""
_LARGE_TILING = 256, 4
_MANY_WAVES = 2.9
"""So many tiles a processor are enough for large tiles, which are faster for heads."""
_LEAST_WAVES = 0.7
"""With fewer tiles a processor the library is faster, which also cuts the inner dimension."""
_MOST_INNER = 2048
"""The longer a product takes for each result, the less is gained by what follows it; and at the limit of its power a
GPU is slower with these kernels, since the library has tiles come from the L2 cache once for two processors."""


def can_be_gated(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether tiled_gated_linear takes x [T, K] and weight [2 * N, K], and is the fastest way."""
    columns, stages = _TILING
    whole = weight.shape[0] % (2 * TURN) == 0
    return whole and _fits(x, stages) and _waves(x, weight, columns) >= _LEAST_WAVES


def tiled_gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return silu(x @ weight[:N].T) * (x @ weight[N:].T): [T, N], of x [T, K] and weight [2 * N, K].

    All of one 16-bit type, contiguous, as can_be_gated says; nothing is rounded before the result.
    """
    num_rows, num_columns = x.shape[0], weight.shape[0] // 2
    columns, stages = _TILING
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    tiles = _tiles(num_rows, 2 * num_columns, columns)
    launch(
        tiled_gated_kernel,
        (min(tiles[0] * tiles[1], num_processors(x.device)),),
        _describe_weight(weight, columns),
        _describe_rows(x),
        out,
        num_rows,
        num_columns,
        -(-x.shape[1] // INNER),
        *tiles,
        min(_BAND, tiles[0]),
        columns,
        stages,
        num_warps=4,
        dependent=True,
    )
    return out


def heads_tiling(x: torch.Tensor, weight: torch.Tensor, heads: HeadPlaces) -> tuple[int, int] | None:
    """How tiled_heads_linear cuts the product of x [T, K] and weight [N, K]; None where it is not the fastest way."""
    kv_heads, head_dim = heads.k_cache.shape[2:]
    if head_dim not in (64, 128) or heads.cos_sin.shape[1] != head_dim:
        return None
    kinds = weight.shape[0] - 2 * kv_heads * head_dim, kv_heads * head_dim
    for (columns, stages), waves in ((_LARGE_TILING, _MANY_WAVES), (_TILING, _LEAST_WAVES)):
        alike = all(kind % columns == 0 for kind in kinds)  # a tile has heads of one kind
        if alike and _fits(x, stages) and _waves(x, weight, columns) >= waves:
            return columns, stages
    return None


def tiled_heads_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, heads: HeadPlaces, tiling: tuple[int, int]
) -> torch.Tensor:
    """Return rotary_and_store(x @ weight.T + bias, heads): queries [T, H, D], of x [T, K] and weight [N, K].

    All of one 16-bit type, contiguous; tiling is what heads_tiling gives.
    """
    num_rows, columns = x.shape[0], tiling[0]
    kv_heads, head_dim = heads.k_cache.shape[2:]
    num_queries = weight.shape[0] - 2 * kv_heads * head_dim
    query = torch.empty((num_rows, num_queries // head_dim, head_dim), dtype=x.dtype, device=x.device)
    tiles = _tiles(num_rows, weight.shape[0], columns)
    launch(
        tiled_heads_kernel,
        (min(tiles[0] * tiles[1], num_processors(x.device)),),
        _describe_weight(weight, columns),
        _describe_rows(x),
        x if bias is None else bias,
        x if heads.q_norm is None else heads.q_norm,
        x if heads.k_norm is None else heads.k_norm,
        heads.positions,
        heads.cos_sin,
        heads.slot_mapping,
        query,
        heads.k_cache,
        heads.v_cache,
        num_queries,
        kv_heads * head_dim,
        heads.eps,
        num_rows,
        -(-x.shape[1] // INNER),
        *tiles,
        min(_BAND, tiles[0]),
        *tiling,
        head_dim,
        heads.q_norm is not None,
        bias is not None,
        num_warps=4,
        dependent=True,
    )
    return query


def _fits(x: torch.Tensor, stages: int) -> bool:
    """Whether the kernels take such rows, with a ring of so many stages, and they are worth it."""
    if x.shape[0] < MIN_ROWS or x.dtype not in (torch.bfloat16, torch.float16) or not is_hopper(x.device):
        return False
    return x.shape[1] % 8 == 0 and (stages - 1) * INNER < x.shape[1] <= _MOST_INNER


def _waves(x: torch.Tensor, weight: torch.Tensor, columns: int) -> float:
    """Tiles for each processor, of the next power of two of rows: then few numbers of rows need all variants."""
    down, across = _tiles(1 << (x.shape[0] - 1).bit_length(), weight.shape[0], columns)
    return down * across / num_processors(x.device)


def _tiles(num_rows: int, weight_rows: int, columns: int) -> tuple[int, int]:
    return -(-num_rows // _ROWS), -(-weight_rows // columns)


def _describe_rows(x: torch.Tensor) -> TensorDescriptor:
    return describe(x, x.shape, (x.shape[1], 1), (GROUP_ROWS, INNER))


def _describe_weight(weight: torch.Tensor, columns: int) -> TensorDescriptor:
    """Half of a tile's rows; of each TURN of them, row 8 * q + 2 * i + e comes to lie at 8 * i + 2 * q + e."""
    num_rows, size = weight.shape
    return describe(
        weight,
        (num_rows // TURN, 4, 4, 2, size),
        (TURN * size, 2 * size, 8 * size, size, 1),
        (columns // 2 // TURN, 4, 4, 2, INNER),
    )
