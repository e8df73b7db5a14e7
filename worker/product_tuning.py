"""Choosing the fastest way of each matrix product at each number of rows: a tile of our kernel, or the library.

Measured on the model's own weights, layer after layer, as a step runs them: so the L2 cache holds no weight of the
next layer, and what a kernel gains by starting early is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.kernels.launch import shared_memory
from paceline.kernels.linear import linear
from paceline.kernels.tiled_linear import MAX_BUCKET, MIN_BUCKET, Tile, candidate_tiles
from paceline.model.decoder import CausalLM
from paceline.model.embedding import ParallelLMHead
from paceline.model.linear import GatedColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from paceline.worker.tuning_cache import TuningCache

Layer = MergedColumnParallelLinear | RowParallelLinear | ParallelLMHead
Measure = Callable[[Callable[[], None]], float]
"""Seconds that the launches of a function take."""

BUCKETS = [1 << power for power in range(MIN_BUCKET.bit_length() - 1, MAX_BUCKET.bit_length())]
ENOUGH_BYTES = 1 << 28
"""Weights of one kind that are more than any L2 cache holds; more layers than have these are not measured."""
REPLAYS = 5
LEAST_GAIN = 0.02
"""A tile that is not faster than the library by this share is not worth its place."""


class ProductTuner:
    """The products of a model whose weights are loaded. None of its methods runs a collective."""

    def __init__(self, model: CausalLM, cache: TuningCache) -> None:
        self._norm = model.model.norm
        self._cache = cache
        self._products: dict[str, list[Layer]] = {}
        for layer in model.modules():
            if isinstance(layer, Layer):
                self._products.setdefault(_name(layer), []).append(layer)
        self._choices = {name: cache.read(name) for name in self._products}

    @property
    def unknown(self) -> list[str]:
        """The products of which not everything is known."""
        return [name for name, choice in self._choices.items() if choice.keys() != set(BUCKETS)]

    def launch_all(self) -> None:
        """Launch every way of the unknown products once: within `compile_only`, to compile them."""
        for name in self.unknown:
            for bucket in BUCKETS:
                self._seconds(self._products[name][:1], bucket, _launch)

    def measure(self, seconds: Measure) -> None:
        """Find the fastest way of the unknown products, and keep it in the cache."""
        for name in self.unknown[:1]:
            # For nothing: a GPU that had no work runs slower than it will.
            self._seconds(_more_than_cached(self._products[name]), MAX_BUCKET, seconds)
        for name in self.unknown:
            layers = _more_than_cached(self._products[name])
            self._choices[name] = {bucket: _fastest(self._seconds(layers, bucket, seconds)) for bucket in BUCKETS}
            self._cache.write(name, self._choices[name])

    def apply(self) -> None:
        """Give every layer its tiles."""
        for name, layers in self._products.items():
            tiles = {bucket: tile for bucket, tile in self._choices[name].items() if tile is not None}
            for layer in layers:
                layer.tiles = tiles

    def _seconds(self, layers: Sequence[Layer], bucket: int, seconds: Measure) -> dict[Tile | None, float]:
        """How long the layers take one after the other, for the library (None) and each tile that the GPU can hold."""
        weight = layers[0].weight
        gated = isinstance(layers[0], GatedColumnParallelLinear)
        most_bytes = shared_memory(weight.device)
        tiles = [tile for tile in candidate_tiles(bucket) if tile.shared_bytes(gated) <= most_bytes]
        x = torch.randn((bucket, weight.shape[1]), dtype=weight.dtype, device=weight.device)

        def launches() -> None:
            for layer in layers:
                if isinstance(layer, RowParallelLinear):
                    linear(x, layer.weight, tiles=layer.tiles)
                else:
                    layer(self._norm, x, x)

        figures: dict[Tile | None, float] = {}
        for tile in (*tiles, None):
            for layer in layers:
                layer.tiles = {} if tile is None else {bucket: tile}
            figures[tile] = seconds(launches)
        return figures


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
    kind = "gated" if isinstance(layer, GatedColumnParallelLinear) else "plain"
    if isinstance(layer, MergedColumnParallelLinear) and layer.bias is not None:
        kind += "-bias"
    columns, size = layer.weight.shape
    return f"{kind}-{columns}x{size}-{str(layer.weight.dtype).removeprefix('torch.')}"


def _more_than_cached(layers: Sequence[Layer]) -> Sequence[Layer]:
    return layers[: 1 + ENOUGH_BYTES // layers[0].weight.nbytes]


def _fastest(figures: dict[Tile | None, float]) -> Tile | None:
    best = min(figures, key=lambda tile: figures[tile])
    return best if figures[best] < (1 - LEAST_GAIN) * figures[None] else None
