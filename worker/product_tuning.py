"""Choosing the faster way of each matrix product at each number of rows: streamed, or as it is without that.

Measured on the model's own weights, layer after layer, as a step runs them: so the L2 cache holds no weight of the
next layer, and what a kernel gains by starting early is counted, as is what the other way computes along with it. The
products of a layer are measured together, in all ways: of a norm between two that are streamed both do a part, and
what a kernel gains by starting early depends on the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, product

import torch

from paceline.kernels.linear import Addend, linear
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.streamed_linear import NO_STREAMS, Stream, Streams, cuts_of, make_exchange
from paceline.model.decoder import CausalLM, DecoderLayer, Products
from paceline.model.embedding import ParallelLMHead
from paceline.model.linear import (
    GatedColumnParallelLinear,
    MergedColumnParallelLinear,
    NextNorm,
    RowParallelLinear,
)
from paceline.worker.tuning_cache import TuningCache

Layer = MergedColumnParallelLinear | RowParallelLinear | ParallelLMHead
Group = Products | tuple[ParallelLMHead]
"""What is measured together."""
Measure = Callable[[Callable[[], None]], float]
"""Seconds that the launches of a function take."""

ENOUGH_BYTES = 1 << 28
"""Weights of one kind that are more than any L2 cache holds; more layers than have these are not measured."""
REPLAYS = 5


class ProductTuner:
    """The products of a model whose weights are loaded. None of its methods runs a collective."""

    def __init__(self, model: CausalLM, cache: TuningCache) -> None:
        self._norm = model.model.norm
        self._cache = cache
        self._groups: dict[str, list[Group]] = {}
        for layer in model.modules():
            if isinstance(layer, DecoderLayer):
                self._groups.setdefault(_name(layer.products), []).append(layer.products)
        self._groups[_name((model.lm_head,))] = [(model.lm_head,)]
        self._streams = _streams_of(self._groups)
        self._choices = {
            name: cache.read(name, len(streams)) for name, streams in self._streams.items() if any(streams)
        }

    @property
    def unknown(self) -> list[str]:
        """The names of what is measured together, of which not everything is known; none where nothing is streamed."""
        return [name for name, choice in self._choices.items() if self._buckets(name) - choice.keys()]

    def launch_all(self) -> None:
        """Launch whatever the ways of the unknown products launch: within `compile_only`, to compile it.

        That depends on whether a product is streamed and whether the next is, so these are alike in turn.
        """
        for name in self.unknown:
            streams = self._streams[name]
            for bucket in sorted(self._buckets(name)):
                for pair in product((False, True), repeat=min(len(streams), 2)):
                    way = [wanted and bucket in of for wanted, of in zip(cycle(pair), streams)]
                    self._seconds(name, self._groups[name][:1], bucket, way, _launch)

    def ways(self) -> Iterator[None]:
        """The layers' streams in turn so that steps of each turn together launch what steps of any choice launch.

        What is known is as chosen. The rest is streamed wherever it can be, then nowhere; `launch_all` has what lies
        between.
        """
        unknown = self.unknown
        self.apply(set(self._choices) - set(unknown))
        for streamed in (True, False) if unknown else (True,):
            for name in unknown:
                for group in self._groups[name]:
                    _stream(group, self._streams[name] if streamed else (NO_STREAMS,) * len(group))
            yield

    def measure(self, seconds: Measure) -> None:
        """Find the faster way of the unknown products, and keep it in the cache."""
        for name in self.unknown[:1]:
            # For nothing: a GPU that had no work runs slower than it will.
            nowhere = [False] * len(self._streams[name])
            self._seconds(name, _more_than_cached(self._groups[name]), max(self._buckets(name)), nowhere, seconds)
        for name in self.unknown:
            groups = _more_than_cached(self._groups[name])
            choice = {}
            for bucket in sorted(self._buckets(name)):
                ways = self._ways_of(name, bucket)
                times = {way: self._seconds(name, groups, bucket, way, seconds) for way in ways}
                choice[bucket] = min(times, key=times.__getitem__)
            self._choices[name] = choice
            self._cache.write(name, choice)

    def apply(self, names: Iterable[str] | None = None) -> None:
        """Give every layer the streams that are the faster way; names: those of these alone."""
        for name in self._choices if names is None else names:
            chosen = [
                {bucket: stream for bucket, stream in streams.items() if self._choices[name][bucket][member]}
                for member, streams in enumerate(self._streams[name])
            ]
            for group in self._groups[name]:
                _stream(group, chosen)

    def _buckets(self, name: str) -> set[int]:
        """The numbers of rows at which any product of a group can be streamed."""
        return {bucket for streams in self._streams[name] for bucket in streams}

    def _ways_of(self, name: str, bucket: int) -> Iterator[tuple[bool, ...]]:
        """Of which products of a group may be streamed at a number of rows, all choices."""
        return product(*((False, True) if bucket in streams else (False,) for streams in self._streams[name]))

    def _seconds(self, name: str, groups: Sequence[Group], bucket: int, way: Sequence[bool], seconds: Measure) -> float:
        """How long some layers' products of a group take one after the other, of which way says which are streamed."""
        chosen = [
            {bucket: streams[bucket]} if streamed else NO_STREAMS
            for streamed, streams in zip(way, self._streams[name], strict=True)
        ]
        for group in groups:
            _stream(group, chosen)
        weights = [layer.weight for layer in groups[0]]
        x, residual = (
            torch.randn((bucket, size), dtype=weights[0].dtype, device=weights[0].device)
            for size in (weights[0].shape[1], weights[-1].shape[1])
        )
        ones = torch.ones_like(x[0])

        def launches() -> None:
            for group in groups:
                if len(group) == 1:
                    group[0](self._norm, x, residual)
                else:
                    self._launch_layer(group, x, residual, ones)

        return seconds(launches)

    def _launch_layer(self, products: Products, x: torch.Tensor, residual: torch.Tensor, ones: torch.Tensor) -> None:
        """Launch what a step launches from attention's result x on to the next layer's queries, keys and values."""
        output, gate_up, down, heads = products
        # In the place of attention, beside which there is room for the weights of what comes next.
        attended = rms_norm(x, ones, self._norm.eps)
        hidden, total = self._add(output, attended, residual, gate_up)
        gated, residual = gate_up(self._norm, hidden, total)
        hidden, total = self._add(down, gated, residual, heads)
        heads(self._norm, hidden, total)

    def _add(
        self, layer: RowParallelLinear, x: torch.Tensor, residual: torch.Tensor, following: MergedColumnParallelLinear
    ) -> tuple[Addend, torch.Tensor | None]:
        """As the layer does it, but without a sum over ranks."""
        if layer.adds:
            return layer.add(x, residual, NextNorm(self._norm, following.streams))
        return linear(x, layer.weight, streams=layer.streams), residual


def _streams_of(groups: Mapping[str, Sequence[Group]]) -> dict[str, tuple[Streams, ...]]:
    """What each product can be streamed with: all exchange through one tensor, since a model runs on one stream."""
    cuts = {
        name: [cuts_of(layer.weight, gated=_is_gated(layer)) for layer in group] for name, (group, *_) in groups.items()
    }
    if not any(of for each in cuts.values() for of in each):
        return {name: (NO_STREAMS,) * len(each) for name, each in cuts.items()}
    exchange = make_exchange(next(iter(groups.values()))[0][0].weight.device)
    return {
        name: tuple({bucket: Stream(cut, exchange) for bucket, cut in of.items()} for of in each)
        for name, each in cuts.items()
    }


def _is_gated(layer: Layer) -> bool:
    """Whether the activation is a part of the product, which it is without bias."""
    return isinstance(layer, GatedColumnParallelLinear) and layer.bias is None


def _stream(group: Sequence[Layer], streams: Sequence[Streams]) -> None:
    for layer, chosen in zip(group, streams, strict=True):
        layer.streams = chosen


def _launch(launches: Callable[[], None]) -> float:
    launches()
    return 0.0


def gpu_seconds(launches: Callable[[], None]) -> float:
    """How long a GPU takes for what a function launches, as a part of a CUDA graph: the best of several replays."""
    launches()  # once outside: libraries set themselves up, which a recording does not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may ask the GPU meanwhile
        launches()
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def _name(group: Group) -> str:
    """What a group's speed depends on, as a file's name."""
    return "-".join(_kind(layer) for layer in group) + f"-{str(group[0].weight.dtype).removeprefix('torch.')}"


def _kind(layer: Layer) -> str:
    if isinstance(layer, RowParallelLinear):
        kind = "added" if layer.adds else "plain"
    else:
        kind = "gated" if isinstance(layer, GatedColumnParallelLinear) else "norm"
    if isinstance(layer, MergedColumnParallelLinear) and layer.bias is not None:
        kind += "-bias"
    columns, size = layer.weight.shape
    return f"{kind}-{columns}x{size}"


def _more_than_cached(groups: Sequence[Group]) -> Sequence[Group]:
    return groups[: 1 + ENOUGH_BYTES // sum(layer.weight.nbytes for layer in groups[0])]
