"""Streamed products on a Hopper GPU, against float64, and where they are not streamed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from paceline.kernels.linear import add_linear, linear, norm_gated_linear, norm_linear
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.skinny_linear import skinny_linear
from paceline.kernels.stream_cut import BUCKETS, Cut
from paceline.kernels.streamed_linear import (
    NO_STREAMS,
    DeferredNorm,
    Stream,
    cuts_of,
    make_exchange,
    stream_of,
    streamed_linear,
)


@pytest.fixture
def exchange(hopper: torch.device) -> torch.Tensor:
    return make_exchange(hopper)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    product = x.double() @ weight.double().T
    if bias is not None:
        product += bias.double()
    if not gated:
        return product
    gate, up = product.chunk(2, dim=-1)
    return functional.silu(gate) * up


@pytest.mark.gpu
@pytest.mark.parametrize("extras", ["", "bias", "gated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 1000, 3072])
@pytest.mark.parametrize("num_columns", [272, 1040, 4112, 9008])
def test_every_bucket(
    num_columns: int, size: int, dtype: torch.dtype, extras: str, hopper: torch.device, exchange: torch.Tensor
) -> None:
    """Rows and columns that fill no tile, few and many steps, on an H200 in eight pieces, four and one.

    There, too, rows are in tiles of 32, 64 and 128. The exchange is left as it was.
    """
    gated = extras == "gated"
    weight = (torch.randn(num_columns * (1 + gated), size, device=hopper) * size**-0.5).to(dtype)
    bias = torch.randn(num_columns, device=hopper).to(dtype) if extras == "bias" else None
    cuts = cuts_of(weight, gated=gated)
    assert list(cuts) == list(BUCKETS)
    for bucket, cut in cuts.items():
        for num_rows in sorted({1, min(bucket // 2 + 3, bucket), max(bucket - 1, 1), bucket}):
            x = torch.randn(num_rows, size, device=hopper).to(dtype)
            out = streamed_linear(x, weight, Stream(cut, exchange), bias=bias, gated=gated)
            assert out.dtype == dtype
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(out.double(), exact(x, weight, bias, gated), rtol=eps, atol=eps)
    assert (exchange == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("extras", ["", "bias", "gated"])
@pytest.mark.parametrize("size", [1040, 4176])
@pytest.mark.parametrize("of_one_row", [False, True], ids=["streamed", "a row by the kernel for few"])
def test_a_norm_between_two_products(
    of_one_row: bool, size: int, extras: str, hopper: torch.device, exchange: torch.Tensor
) -> None:
    """Half of it in each: the sum is that of the products apart, bit for bit, and the next product the norm's."""
    gated = extras == "gated"
    inner = 4096 if of_one_row else 512  # from where a program has four columns, and so more squares than fit at once
    weight = (torch.randn(size, inner, device=hopper) * inner**-0.5).to(torch.bfloat16)
    next_weight = (torch.randn(528 * (1 + gated), size, device=hopper) * size**-0.5).to(torch.bfloat16)
    norm_weight = torch.randn(size, device=hopper).to(torch.bfloat16)
    bias = torch.randn(528, device=hopper).to(torch.bfloat16) if extras == "bias" else None
    streams = {bucket: Stream(cut, exchange) for bucket, cut in cuts_of(weight).items()}
    next_streams = {bucket: Stream(cut, exchange) for bucket, cut in cuts_of(next_weight, gated=gated).items()}
    if of_one_row:
        del streams[1]
    for num_rows in (
        [1] if of_one_row else sorted({1, 2, *(rows for bucket in BUCKETS[1:] for rows in (bucket // 2 + 3, bucket))})
    ):
        x = torch.randn(num_rows, inner, device=hopper).to(torch.bfloat16)
        residual = (torch.randn(num_rows, size, device=hopper) * 8).to(torch.bfloat16)
        deferred, nothing = add_linear(
            x, weight, residual, norm_weight, 1e-6, streams=streams, next_streams=next_streams
        )
        assert isinstance(deferred, DeferredNorm)
        assert nothing is None
        norm = (norm_weight, 1e-6, next_weight)
        if gated:
            out, total = norm_gated_linear(deferred, None, *norm, streams=next_streams)
        else:
            out, total = norm_linear(deferred, None, *norm, bias, streams=next_streams)
        assert torch.equal(total, residual + linear(x, weight, streams=streams))
        wide = total.double()
        normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * norm_weight.double()
        expected = exact(normed, next_weight, bias, gated)
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    assert (exchange == -1).all()


@pytest.mark.gpu
def test_a_norm_is_left_whole_where_a_product_is_not_streamed(hopper: torch.device, exchange: torch.Tensor) -> None:
    weight = torch.randn(256, 256, device=hopper).to(torch.bfloat16)
    streams = {bucket: Stream(cut, exchange) for bucket, cut in cuts_of(weight).items()}
    three_groups = {16: Stream(Cut(16, 128, 4, 1, 3), exchange)}
    x, residual = torch.randn(2, 16, 256, device=hopper).to(torch.bfloat16).unbind()
    norm = weight[0], 1e-6
    for first, second, kind in (
        (NO_STREAMS, streams, torch.bfloat16),
        (streams, NO_STREAMS, torch.bfloat16),
        (three_groups, streams, torch.bfloat16),
        (streams, streams, torch.float16),
    ):
        arguments = [tensor.to(kind) for tensor in (x, weight, residual)]
        out, left = add_linear(*arguments, *norm, streams=first, next_streams=second)
        assert isinstance(out, torch.Tensor)
        assert torch.equal(out, linear(*arguments[:2], streams=first))
        assert left is arguments[2]


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [1, 4])
def test_not_a_number_stays_in_its_row(pieces: int, hopper: torch.device, exchange: torch.Tensor) -> None:
    """Whatever the bits of one are, no program waits for another number in its place."""
    x = torch.ones(9, 512, dtype=torch.bfloat16, device=hopper)
    x[4, 7] = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)
    weight = torch.ones(64, 512, dtype=torch.bfloat16, device=hopper)
    out = streamed_linear(x, weight, Stream(Cut(16, 128, 3, pieces), exchange))
    assert out[4].isnan().all()
    assert (out[[0, 1, 2, 3, 5, 6, 7, 8]] == 512).all()


@pytest.mark.gpu
def test_dependent_launches_wait_for_each_other(
    hopper: torch.device, exchange: torch.Tensor, assert_replays_alike: Callable[..., None]
) -> None:
    layers = [
        (
            torch.randn(2 * 1536, 1024, device=hopper).mul_(1024**-0.5).to(torch.bfloat16),
            torch.randn(1024, 1536, device=hopper).mul_(1536**-0.5).to(torch.bfloat16),
        )
        for _ in range(8)
    ]
    cuts = cuts_of(layers[0][0], gated=True)[64], cuts_of(layers[0][1])[64]
    assert cuts[0].pieces == 1 < cuts[1].pieces
    streams = [Stream(cut, exchange) for cut in cuts]
    start = torch.randn(50, 1024, device=hopper).to(torch.bfloat16)
    ones = torch.ones_like(start[0])

    def chain(ended: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = start
        for gate_up, down in layers:
            x = ended(streamed_linear(x, gate_up, streams[0], gated=True))
            x = ended(streamed_linear(x, down, streams[1]))
            x = ended(rms_norm(x, ones, 1e-6))
        return x

    assert_replays_alike(chain)

    def chain_of_deferred_norms(ended: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x, residual = start, start
        norm = ones, 1e-6
        for gate_up, down in layers:
            gated, total = norm_gated_linear(x, residual, *norm, gate_up, streams={64: streams[0]})
            x, residual = add_linear(
                ended(gated), down, total, *norm, streams={64: streams[1]}, next_streams={64: streams[0]}
            )
            ended(x.total)
        return x.weighted

    assert_replays_alike(chain_of_deferred_norms)


@pytest.mark.gpu
def test_rows_take_their_bucket_s_stream_before_any_other_way(hopper: torch.device, exchange: torch.Tensor) -> None:
    """From two rows on; where there is none, the kernel for few rows, or the library."""
    weight = torch.randn(128, 256, device=hopper).to(torch.bfloat16)
    norm_weight = torch.ones_like(weight[0])
    streams = {bucket: Stream(cut, exchange) for bucket, cut in cuts_of(weight).items()}
    gated = {bucket: Stream(cut, exchange) for bucket, cut in cuts_of(weight, gated=True).items()}
    norm = (None, norm_weight, 1e-6, weight)
    few = (1, 1), (2, 8), (8, 8), (9, 16)
    for num_rows, bucket in (*few, (100, 128), (129, 192), (193, 256), (257, None), (300, None)):
        x = torch.randn(num_rows, 256, device=hopper).to(torch.bfloat16)
        stream = None if bucket is None else streams[bucket]
        assert stream_of(x, streams) is stream
        normed = rms_norm(x, norm_weight, 1e-6)
        if stream is not None and bucket is not None:
            expected, expected_of_norm = streamed_linear(x, weight, stream), streamed_linear(normed, weight, stream)
            expected_gated = streamed_linear(normed, weight, gated[bucket], gated=True)
            assert torch.equal(norm_gated_linear(x, *norm, streams=gated)[0], expected_gated)
        else:
            expected, expected_of_norm = functional.linear(x, weight), functional.linear(normed, weight)
        assert torch.equal(linear(x, weight, streams=streams), expected)
        assert torch.equal(norm_linear(x, *norm, streams=streams)[0], expected_of_norm)
    few = torch.randn(2, 256, device=hopper).to(torch.bfloat16)
    assert torch.equal(linear(few, weight, streams=NO_STREAMS), skinny_linear(few, weight)[0])


@pytest.mark.gpu
def test_what_cannot_be_streamed(hopper: torch.device) -> None:
    weight = torch.empty(2048, 512, dtype=torch.bfloat16, device=hopper)
    assert cuts_of(weight, gated=True)
    assert cuts_of(weight.float()) == {}
    assert cuts_of(weight[:, :500].contiguous()) == {}
    assert cuts_of(weight[:2032], gated=True) == {}
    assert cuts_of(weight[:2040]) == {}


def test_a_cpu_streams_nothing() -> None:
    weight = torch.empty(128, 64, dtype=torch.bfloat16)
    assert cuts_of(weight) == {}
    assert stream_of(weight, {128: Stream(Cut(128, 64, 3), torch.empty(0))}) is None
