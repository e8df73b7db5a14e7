"""What each rank holds of a model, worked out from its config alone: no weights, no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.model.communicator import Communicator, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.ledger import get_parameter
from paceline.model.parameter import Shard, ShardId
from paceline.model.registry import MODEL_CLASSES
from paceline.model.shard_plan import ShardPlan


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter on all ranks."""

    name: str
    shards: Sequence[Mapping[ShardId, Shard]]
    """By rank."""
    shape: tuple[int, ...]
    """On each rank; ranks have equal shapes."""
    num_bytes: int
    """On each rank."""

    @property
    def rule(self) -> str:
        """How the parameter is cut, in words."""
        cuts = self._cuts()
        if all(cut.is_whole for cut in cuts.values()):
            return "whole"
        words = ["columns" if any(cut.first.dim == 1 for cut in cuts.values()) else "rows"]
        names = [shard_id for shard_id in cuts if shard_id is not None]
        if names:
            words[0] += f" of {', '.join(names)}"
        if copied := {shard_id: cut.copies for shard_id, cut in cuts.items() if cut.copies > 1}:
            words.append(f"{', '.join(map(str, copied))} on {max(copied.values())} ranks each")
        if self.padding_share:
            words.append(f"{self.padding_share:.1%} padding")
        return "; ".join(words)

    @property
    def padding_share(self) -> float:
        """Share of what all ranks hold that is padding."""
        cuts = self._cuts().values()
        return sum(cut.padding for cut in cuts) / sum(cut.padded for cut in cuts)

    def _cuts(self) -> dict[ShardId, _Cut]:
        return {shard_id: _Cut([by_id[shard_id] for by_id in self.shards]) for shard_id in self.shards[0]}


class _Cut:
    """One shard on all ranks."""

    def __init__(self, by_rank: Sequence[Shard]) -> None:
        spans = [shard.span for shard in by_rank]
        held = sum(span.length for span in spans)
        self.first = by_rank[0]
        self.is_whole = all(span.length == span.total for span in spans)
        self.copies = held // spans[0].total
        self.padded = sum(span.padded for span in spans)
        self.padding = self.padded - held


@dataclass(frozen=True)
class ModelPlan:
    """All parameters of a model on tp ranks, and what a token costs in the cache."""

    tp: int
    dtype: str
    parameters: Sequence[ParameterPlan]
    kv_bytes_per_token: int
    """On each rank."""

    @property
    def weight_bytes(self) -> int:
        """On each rank."""
        return sum(parameter.num_bytes for parameter in self.parameters)


def plan_model(config: ModelConfig, tp: int, dtype: torch.dtype) -> ModelPlan:
    """The plan of a model whose weights and cache have the dtype. Raises ModelConfigError where tp is below 1."""
    shards = ShardPlan(config, tp)

    def build(comm: Communicator) -> CausalLM:
        return MODEL_CLASSES[config.architecture](config, comm, dtype, 1)

    models = run_simulated_ranks(tp, build)
    parameters = [
        ParameterPlan(
            name,
            [get_parameter(model, name).shards for model in models],
            tuple(parameter.shape),
            parameter.numel() * dtype.itemsize,
        )
        for name, parameter in models[0].named_parameters()
    ]
    per_layer = 2 * shards.kv_heads(0).padded * config.head_dim * dtype.itemsize
    return ModelPlan(tp, str(dtype).removeprefix("torch."), parameters, per_layer * config.num_hidden_layers)
