"""From a checkpoint folder to one rank's model: check everything, take memory, then read this rank's slices.

Nothing here talks to other ranks. They see the same files and so find the same faults.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from paceline.model.checkpoint_files import CheckpointFiles, StoredTensor
from paceline.model.communicator import Communicator
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.dummy_tensors import DummyTensor
from paceline.model.ledger import Assignment, Ledger, get_parameter, tensor_targets
from paceline.model.parameter import ShardedParameter
from paceline.model.registry import MODEL_CLASSES

logger = logging.getLogger(__name__)


def load_model(
    folder: Path | str,
    config: ModelConfig,
    comm: Communicator,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    load_format: str = "safetensors",
) -> CausalLM:
    """This rank's shard of the model, on its device and ready to run.

    load_format `dummy` takes random weights, the same at any number of ranks, and reads no file. Raises
    CheckpointError with all faults of the checkpoint in one line, and ModelConfigError where the rope type does not
    reach max_model_len.
    """
    model = MODEL_CLASSES[config.architecture](config, comm, dtype, max_model_len)
    if load_format == "dummy":
        _materialise(model, device)
        _fill(model, _dummy_assignments(model, dtype, device))
        return model
    with CheckpointFiles(Path(folder)) as files:
        ledger = Ledger(model)
        for _, tensor in sorted(files.tensors.items()):
            ledger.enter(tensor)
        ledger.close(files.folder, files.faults)
        if comm.rank == 0:
            _log_choices(ledger, files.tensors.values(), dtype)
        _materialise(model, device)
        _fill(model, ledger.assignments)
    return model


def _dummy_assignments(model: CausalLM, dtype: torch.dtype, device: torch.device) -> list[Assignment]:
    """Random tensors for every shard, under the names that a checkpoint has."""
    assignments = []
    for name, (parameter_name, shard_id) in tensor_targets(model).items():
        shards = get_parameter(model, parameter_name).shards
        if shard_id in shards:
            tensor = DummyTensor(name, shards[shard_id].full_shape, dtype, device)
            assignments.append(Assignment(tensor, parameter_name, shard_id))
    return assignments


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Put a model's parameters, zero-filled, and its buffers on a device; tied parameters stay one."""
    placed: dict[nn.Parameter, ShardedParameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in placed:
                placed[parameter] = get_parameter(module, name).materialise(device)
            setattr(module, name, placed[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def _fill(model: nn.Module, assignments: Iterable[Assignment]) -> None:
    """Let each parameter take its slices."""
    for assignment in assignments:
        parameter = get_parameter(model, assignment.parameter_name)
        parameter.weight_loader(parameter, assignment.tensor, assignment.shard_id)


def _log_choices(ledger: Ledger, tensors: Iterable[StoredTensor], dtype: torch.dtype) -> None:
    """Say what is not read, and which types are cast; to float16 with a warning, since its range is the smallest."""
    if ledger.ignored:
        logger.info("not needed and not read: %s", ", ".join(ledger.ignored))
    level = logging.WARNING if dtype == torch.float16 else logging.INFO
    for stored in sorted({tensor.dtype for tensor in tensors} - {dtype}, key=str):
        logger.log(level, "weights stored as %s are cast to %s", stored, dtype)
