"""Loading a model's shards, and holding them against its checkpoint and against the same model on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.coordinator.errors import EngineError
from paceline.model.checkpoint_tensors import CheckpointTensors
from paceline.model.communicator import Communicator, SingleRank, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.errors import CollectiveError
from paceline.model.shard_reader import StopFlag
from paceline.model.shard_table import ModelPlan, plan_model
from paceline.model.staging import StagingMemory
from paceline.model.verify_forward import MAX_MODEL_LEN, TOLERANCE, compare_logits, probe_logits
from paceline.model.verify_shards import Difference, verify_shards, verify_tied_head
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
    tied_head_checked: bool = False
    """Whether the checkpoint has a head beside a tied embedding, which then was compared with it, too."""
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

        def body(comm: Communicator) -> tuple[ShardReport, torch.Tensor | None]:
            with StagingMemory(CPU, tp) as staging:
                model = self._load(comm, staging, self.dtype)
            return self._check_shards(model, plan, comm), self._logits(model, comm, CPU)

        report, logits = run_simulated_ranks(tp, body)[0]
        return self._with_forward(report, logits, CPU)

    def run(self, ranks: RankGroup) -> ShardReport | None:
        """Verify as one of the group's processes; the report on rank 0, None on the others.

        Raises InputError on all ranks where the loading fails on one, or the checkpoint cannot be read again, and
        EngineError where another rank is gone.
        """
        try:
            return self._run(ranks)
        except CollectiveError as error:
            raise EngineError(str(error)) from error

    def _run(self, ranks: RankGroup) -> ShardReport | None:
        plan = plan_model(self.config, ranks.size, self.dtype)
        with StagingMemory(ranks.device, ranks.size) as staging, ranks.together() as stop:
            model = self._load(ranks.communicator, staging, self.dtype, stop)
        with ranks.together():  # with collectives, but an error is raised after the last of them
            report = self._check_shards(model, plan, ranks.communicator)
        logits = self._logits(model, ranks.communicator, ranks.device)
        del model  # makes room for the unsharded one
        with ranks.together():
            if ranks.rank == 0:
                report = self._with_forward(report, logits, ranks.device)
        return report if ranks.rank == 0 else None

    def _load(
        self, comm: Communicator, staging: StagingMemory, dtype: torch.dtype, stop: StopFlag | None = None
    ) -> CausalLM:
        return load_model(self._folder, self.config, comm, staging, dtype, max_model_len=MAX_MODEL_LEN, stop=stop)

    def _check_shards(self, model: CausalLM, plan: ModelPlan, comm: Communicator) -> ShardReport:
        """What rank 0 sees of all ranks' shards; other ranks see nothing. CheckpointError as of verify_shards."""
        with CheckpointTensors(self._folder) as tensors:
            differences = verify_shards(model, plan, comm, tensors)
            tied = verify_tied_head(model, self.dtype, tensors) if comm.rank == 0 else None
        return ShardReport(plan, [*differences, *(tied or ())], checked=True, tied_head_checked=tied is not None)

    def _logits(self, model: CausalLM, comm: Communicator, device: torch.device) -> torch.Tensor | None:
        """Those of a short forward pass in float32, which changes the model."""
        return probe_logits(model.float(), comm, device) if self._forward else None

    def _with_forward(self, report: ShardReport, logits: torch.Tensor | None, device: torch.device) -> ShardReport:
        """The report with what the logits show, held against those of the whole model on one rank."""
        if logits is None:
            return report
        if self._unsharded is None:
            with StagingMemory(device, 1) as staging:
                model = self._load(SingleRank(), staging, torch.float32)
            self._unsharded = probe_logits(model, SingleRank(), device)
        error, difference = compare_logits(logits, self._unsharded)
        found = [*report.differences, *([difference] if difference else [])]
        return replace(report, differences=found, forward_error=error)
