"""Loading a model's shards, and holding them against its checkpoint and against the same model on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.model.communicator import Communicator, SingleRank, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.shard_reader import StopFlag
from paceline.model.shard_table import ModelPlan, plan_model
from paceline.model.staging import StagingMemory
from paceline.model.verify_forward import MAX_MODEL_LEN, TOLERANCE, compare_logits, probe_logits
from paceline.model.verify_shards import CheckpointTensors, Difference, verify_shards
from paceline.model.weights import load_model
from paceline.worker.ranks import RankGroup

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ShardReport:
    """A model's plan on so many ranks, and what was found of its shards (nothing where only the config was read)."""

    plan: ModelPlan
    differences: Sequence[Difference] = ()
    """The first of each parameter that has one, in the order of the plan; last that of the forward pass."""
    checked: bool = False
    forward_error: float | None = None
    """Largest difference of two logits, as a share of the largest logit; None where no forward pass was run."""

    @property
    def forward_tolerance(self) -> float:
        """What forward_error may be."""
        return TOLERANCE

    def is_verified(self, parameter_name: str) -> bool:
        """Whether a parameter's shards were checked and are the checkpoint."""
        return self.checked and all(difference.parameter != parameter_name for difference in self.differences)


class ShardVerifier:
    """A checkpoint to be verified; dtype `auto` is the checkpoint's own."""

    def __init__(self, folder: Path, dtype: str, *, forward: bool = True) -> None:
        """forward False leaves out the forward pass, which needs the whole model in float32 on one rank.

        Raises ModelConfigError where config.json cannot be used.
        """
        self.config = ModelConfig.from_folder(folder)
        self.dtype: torch.dtype = getattr(torch, self.config.dtype if dtype == "auto" else dtype)
        self._folder = folder
        self._forward = forward
        self._unsharded: torch.Tensor | None = None

    def plan(self, tp: int) -> ShardReport:
        """The plan alone, from the config."""
        return ShardReport(plan_model(self.config, tp, self.dtype))

    def simulate(self, tp: int) -> ShardReport:
        """Verify tp ranks that are threads of this process. Raises CheckpointError where the loading fails."""
        plan = plan_model(self.config, tp, self.dtype)

        def body(comm: Communicator) -> tuple[list[Difference], torch.Tensor | None]:
            with StagingMemory(CPU, tp) as staging:
                model = self._load(comm, staging, self.dtype)
            return self._check(model, plan, comm, CPU)

        differences, logits = run_simulated_ranks(tp, body)[0]
        return self._report(plan, differences, logits, CPU)

    def run(self, ranks: RankGroup) -> ShardReport | None:
        """Verify as one of the group's processes; the report on rank 0, None on the others.

        Raises InputError on all ranks where the loading fails on one.
        """
        plan = plan_model(self.config, ranks.size, self.dtype)
        with StagingMemory(ranks.device, ranks.size) as staging, ranks.together() as stop:
            model = self._load(ranks.communicator, staging, self.dtype, stop)
        differences, logits = self._check(model, plan, ranks.communicator, ranks.device)
        del model  # makes room for the unsharded one
        report = None
        with ranks.together():
            if ranks.rank == 0:
                report = self._report(plan, differences, logits, ranks.device)
        return report

    def _load(
        self, comm: Communicator, staging: StagingMemory, dtype: torch.dtype, stop: StopFlag | None = None
    ) -> CausalLM:
        return load_model(self._folder, self.config, comm, staging, dtype, max_model_len=MAX_MODEL_LEN, stop=stop)

    def _check(
        self, model: CausalLM, plan: ModelPlan, comm: Communicator, device: torch.device
    ) -> tuple[list[Difference], torch.Tensor | None]:
        """What one rank sees of its model: the differences (rank 0), and the logits of a short forward pass."""
        with CheckpointTensors(self._folder) as tensors:
            differences = verify_shards(model, plan, comm, tensors)
        return differences, probe_logits(model.float(), comm, device) if self._forward else None

    def _report(
        self, plan: ModelPlan, differences: list[Difference], logits: torch.Tensor | None, device: torch.device
    ) -> ShardReport:
        if logits is None:
            return ShardReport(plan, differences, checked=True)
        if self._unsharded is None:
            with StagingMemory(device, 1) as staging:
                model = self._load(SingleRank(), staging, torch.float32)
            self._unsharded = probe_logits(model, SingleRank(), device)
        error, difference = compare_logits(logits, self._unsharded)
        found = [*differences, *([difference] if difference else [])]
        return ShardReport(plan, found, checked=True, forward_error=error)
