"""Matrix products of up to some hundred rows with a large weight on Hopper GPUs, in Gluon.

Such a product is a stream of the weight through the GPU. Here the tensor memory accelerator brings it into a ring of
tiles in shared memory, which is always on its way: it is asked for before the kernel waits for its input (programmatic
dependent launch, docs/gpu-step.md), and the next columns' tiles while the last columns' sums are stored. The weight is
the first matrix of the tensor cores, which take 64 rows of it, but as few as 8 columns of the second.

Where there are too few columns for all processors, the inner dimension is cut into pieces. Their programs exchange
their sums through the L2 cache, and each adds up and stores some of the rows. How a product is cut is stream_cut.py's
rule, and whether it then beats the library is measured: worker/product_tuning.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from paceline.kernels.launch import is_hopper, launch, num_processors, shared_memory
from paceline.kernels.stream_cut import (
    BUCKETS,
    MOST_ROWS_OF_PIECES,
    WEIGHT_ROWS,
    Cut,
    bucket_of,
    cut_product,
    num_tiles,
)
from paceline.kernels.streamed_kernel import streamed_kernel
from paceline.kernels.streamed_results import TURN
from paceline.kernels.streamed_rows import describe_rows
from paceline.kernels.tensor_descriptors import TensorDescriptor, describe


@dataclass(frozen=True)
class Stream:
    """What a product is streamed with: its cut, and what its pieces exchange their sums through (`make_exchange`)."""

    cut: Cut
    exchange: torch.Tensor


@dataclass(frozen=True)
class DeferredNorm:
    """The root-mean-square norm of a total [T, K] for a streamed product, all but the scales of its rows."""

    weighted: torch.Tensor
    """[T, K]: the total times the norm's weights."""
    squares: torch.Tensor
    """[tiles, T] float32: sums of the total's squares, each of a row's columns in a tile."""
    eps: float
    total: torch.Tensor
    stream: Stream
    """The product's."""


Streams = Mapping[int, Stream]
"""A stream for each bucket of rows; with other numbers of rows the product is not streamed."""
NO_STREAMS: Streams = MappingProxyType({})


def cuts_of(weight: torch.Tensor, *, gated: bool = False) -> dict[int, Cut]:
    """The cut of products with weight [N, K], or [2 * N, K], for each bucket of rows in which it can be streamed."""
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16) or not is_hopper(weight.device):
        return {}
    num_columns, size = _columns(weight, gated), weight.shape[1]
    gpu = {"processors": num_processors(weight.device), "shared_bytes": shared_memory(weight.device)}
    cuts = {bucket: cut_product(num_columns, size, bucket, gated=gated, **gpu) for bucket in BUCKETS}
    return {bucket: cut for bucket, cut in cuts.items() if cut is not None}


def make_exchange(device: torch.device) -> torch.Tensor:
    """What the products of a device exchange their sums through, 2.1 MiB on an H200.

    All that share it must run one after the other, on one stream or ordered as on one. It is filled here and left as
    it was by every product, so it must be made before a CUDA graph is recorded that uses it, and not moved after.
    """
    words = num_processors(device) * WEIGHT_ROWS * MOST_ROWS_OF_PIECES  # the sums of a program for each processor
    return torch.full((words,), -1, dtype=torch.int32, device=device)


def stream_of(x: torch.Tensor, streams: Streams) -> Stream | None:
    """The stream for x [T, K]; None where the product is not streamed."""
    bucket = bucket_of(x.shape[0]) if x.is_cuda and x.shape[0] > 0 else None
    return None if bucket is None else streams.get(bucket)


def streamed_linear(
    x: torch.Tensor | DeferredNorm,
    weight: torch.Tensor,
    stream: Stream,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Return x [T, K] times the transpose of weight [N, K] plus bias [N]: [T, N], accumulated in float32.

    x: or a norm that lacks its rows' scales. gated: weight is [2 * N, K] and the result
    silu(x @ weight[:N].T) * (x @ weight[N:].T), without bias.
    All of one 16-bit type, contiguous; cut as `cuts_of` has it for at least T rows.
    """
    return _launch(x, weight, stream, bias=bias, gated=gated)


def streamed_add_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    stream: Stream,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    next_stream: Stream,
) -> DeferredNorm:
    """The norm of residual [T, N] + streamed_linear(x, weight, stream) for the next product, of bfloat16.

    norm_weight [N] and eps are the norm's. For streams that `can_add`.
    """
    num_rows, num_columns = residual.shape
    total = torch.empty_like(residual)
    tiles = num_tiles(num_columns, gated=False)
    squares = torch.empty((tiles, num_rows), dtype=torch.float32, device=x.device)
    weighted = _launch(x, weight, stream, added=(residual, norm_weight, total, squares))
    return DeferredNorm(weighted, squares, eps, total, next_stream)


def can_add(stream: Stream) -> bool:
    """Whether the product's result can be added to a residual stream: several groups of warps lack the registers."""
    return stream.cut.groups == 1


def _launch(
    x: torch.Tensor | DeferredNorm,
    weight: torch.Tensor,
    stream: Stream,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    added: tuple[torch.Tensor, ...] | None = None,
) -> torch.Tensor:
    """Launch the kernel. added: residual stream and norm's weights, and the total and its squares, which it writes."""
    no_squares = stream.exchange.view(torch.float32)
    squares, num_squares, eps = no_squares, 0, 0.0
    if isinstance(x, DeferredNorm):
        squares, num_squares, eps = x.squares, x.squares.shape[0], x.eps
        x = x.weighted
    num_rows, size = x.shape
    num_columns = _columns(weight, gated)
    cut = stream.cut
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    row_tiles = -(-num_rows // cut.rows)
    described, second_half = describe_rows(x, cut.rows, cut.inner)
    items = num_tiles(num_columns, gated, cut.groups) * cut.pieces
    launch(
        streamed_kernel,
        (row_tiles, min(items, num_processors(x.device) // row_tiles)),
        _describe_weight(weight, cut, gated),
        described,
        x if bias is None else bias,
        stream.exchange,
        out,
        num_rows,
        num_columns,
        second_half,
        -(-size // (cut.inner * cut.pieces)),
        items,
        squares,
        num_squares,
        size,
        eps,
        *(added or (out, out, out, no_squares)),
        int(added is not None),
        cut.rows,
        cut.inner,
        cut.stages,
        cut.groups,
        cut.pieces,
        gated,
        bias is not None,
        num_warps=4,
        maxnreg=cut.max_registers,
        dependent=True,
    )
    return out


def _columns(weight: torch.Tensor, gated: bool) -> int:
    return weight.shape[0] // 2 if gated else weight.shape[0]


def _describe_weight(weight: torch.Tensor, cut: Cut, gated: bool) -> TensorDescriptor:
    """Describe weight [N, K] as [N / 16, 2, 8, K]: 8 even rows, then 8 odd ones; [2 * N, K] so for gate and up."""
    num_rows, size = weight.shape
    turn = TURN.value
    if gated:
        shape, strides = (num_rows // 2 // turn, 2, turn), (turn * size, num_rows // 2 * size, size)
    else:
        shape, strides = (num_rows // (2 * turn), 2, turn), (2 * turn * size, size, 2 * size)
    box = (WEIGHT_ROWS // (2 * turn), 2, turn)
    return describe(weight, (*shape, size), (*strides, 1), (*box, cut.inner))
