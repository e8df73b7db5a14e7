"""Choosing the faster way of each matrix product at each number of rows: streamed, or as it is without that.

Measured on the model's own weights, layer after layer, as a step runs them: so the L2 cache holds no weight of the
next layer, and what a kernel gains by starting early is counted, as is what the other way computes along with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from paceline.kernels.linear import linear
from paceline.kernels.streamed_linear import NO_STREAMS, Stream, Streams, cuts_of, make_exchange
from paceline.model.decoder import CausalLM
from paceline.model.embedding import ParallelLMHead
from paceline.model.linear import GatedColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from paceline.worker.tuning_cache import TuningCache

Layer = MergedColumnParallelLinear | RowParallelLinear | ParallelLMHead
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
        self._products: dict[str, list[Layer]] = {}
        for layer in model.modules():
            if isinstance(layer, Layer):
                self._products.setdefault(_name(layer), []).append(layer)
        self._streams = _streams_of(self._products)
        self._choices = {name: cache.read(name) for name, streams in self._streams.items() if streams}

    @property
    def unknown(self) -> list[str]:
        """The products of which not everything is known; none on a GPU that streams nothing."""
        return [name for name, choice in self._choices.items() if self._streams[name].keys() - choice.keys()]

    def launch_all(self) -> None:
        """Launch both ways of the unknown products once: within `compile_only`, to compile them."""
        for name in self.unknown:
            for bucket in self._streams[name]:
                self._seconds(name, self._products[name][:1], bucket, _launch)

    def ways(self) -> Iterator[None]:
        """The layers' streams in turn so that steps of each turn together launch what steps of any choice launch.

        Where all is known that is the choice alone; else all products are streamed wherever they can be, then nowhere.
        """
        if not self.unknown:
            self.apply()
            yield
            return
        for streams in (self._streams, dict.fromkeys(self._streams, NO_STREAMS)):
            for name, layers in self._products.items():
                for layer in layers:
                    layer.streams = streams[name]
            yield

    def measure(self, seconds: Measure) -> None:
        """Find the faster way of the unknown products, and keep it in the cache."""
        for name in self.unknown[:1]:
            # For nothing: a GPU that had no work runs slower than it will.
            self._seconds(name, _more_than_cached(self._products[name]), max(self._streams[name]), seconds)
        for name in self.unknown:
            layers = _more_than_cached(self._products[name])
            choice = {}
            for bucket in self._streams[name]:
                streamed, other = self._seconds(name, layers, bucket, seconds)
                choice[bucket] = streamed < other
            self._choices[name] = choice
            self._cache.write(name, choice)

    def apply(self) -> None:
        """Give every layer the streams that are the faster way."""
        for name, choice in self._choices.items():
            chosen = {bucket: stream for bucket, stream in self._streams[name].items() if choice[bucket]}
            for layer in self._products[name]:
                layer.streams = chosen

    def _seconds(self, name: str, layers: Sequence[Layer], bucket: int, seconds: Measure) -> tuple[float, float]:
        """How long some layers of a product take one after the other: streamed, and else."""
        weight = layers[0].weight
        x = torch.randn((bucket, weight.shape[1]), dtype=weight.dtype, device=weight.device)

        def launches() -> None:
            for layer in layers:
                if isinstance(layer, RowParallelLinear):
                    linear(x, layer.weight, streams=layer.streams)
                else:
                    layer(self._norm, x, x)

        def timed(streams: Streams) -> float:
            for layer in layers:
                layer.streams = streams
            return seconds(launches)

        return timed({bucket: self._streams[name][bucket]}), timed(NO_STREAMS)


def _streams_of(products: Mapping[str, Sequence[Layer]]) -> dict[str, Streams]:
    """What each product can be streamed with: all exchange through one tensor, since a model runs on one stream."""
    cuts = {name: cuts_of(layers[0].weight, gated=_is_gated(layers[0])) for name, layers in products.items()}
    if not any(cuts.values()):
        return dict.fromkeys(products, NO_STREAMS)
    exchange = make_exchange(next(iter(products.values()))[0].weight.device)
    return {name: {bucket: Stream(cut, exchange) for bucket, cut in of.items()} for name, of in cuts.items()}


def _is_gated(layer: Layer) -> bool:
    """Whether the activation is a part of the product, which it is without bias."""
    return isinstance(layer, GatedColumnParallelLinear) and layer.bias is None


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


def _name(layer: Layer) -> str:
    """What a product's speed depends on, as a file's name."""
    if isinstance(layer, RowParallelLinear):
        kind = "plain"
    else:
        kind = "norm-gated" if isinstance(layer, GatedColumnParallelLinear) else "norm"
    if isinstance(layer, MergedColumnParallelLinear) and layer.bias is not None:
        kind += "-bias"
    columns, size = layer.weight.shape
    return f"{kind}-{columns}x{size}-{str(layer.weight.dtype).removeprefix('torch.')}"


def _more_than_cached(layers: Sequence[Layer]) -> Sequence[Layer]:
    return layers[: 1 + ENOUGH_BYTES // layers[0].weight.nbytes]
