"""From a checkpoint folder to one rank's model: check everything, take memory, then read this rank's slices.

Nothing here talks to other ranks. They see the same files and so find the same faults.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paceline.model.checkpoint_files import STORED_DTYPES, CheckpointFiles, StoredTensor
from paceline.model.communicator import Communicator
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.dummy_tensors import DummyTensor
from paceline.model.errors import CheckpointError
from paceline.model.parameter import LoadedTensor, ShardedParameter, ShardId, expected_shape
from paceline.model.registry import MODEL_CLASSES

logger = logging.getLogger(__name__)

_MOST_FAULTS_SHOWN = 10


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
        materialise(model, device)
        fill(model, dummy_assignments(model, dtype, device))
    else:
        with CheckpointFiles(Path(folder)) as files:
            assignments = checkpoint_assignments(model, files)
            if comm.rank == 0:
                _log_casts(files.tensors, dtype)
            materialise(model, device)
            fill(model, assignments)
    return model.eval()


@dataclass(frozen=True)
class Assignment:
    """One tensor that fills one shard of a parameter, or all of them where shard_id is not among the shards."""

    tensor: LoadedTensor
    parameter_name: str
    shard_id: ShardId


def dummy_assignments(model: CausalLM, dtype: torch.dtype, device: torch.device) -> list[Assignment]:
    """Random tensors for every shard, under the names that a checkpoint has."""
    assignments = []
    for name, (parameter_name, shard_id) in tensor_targets(model).items():
        parameter = get_parameter(model, parameter_name)
        if shard_id in parameter.shards:
            tensor = DummyTensor(name, parameter.shards[shard_id].full_shape, dtype, device)
            assignments.append(Assignment(tensor, parameter_name, shard_id))
    return assignments


def checkpoint_assignments(model: CausalLM, files: CheckpointFiles) -> list[Assignment]:
    """Where each tensor of a checkpoint goes, judged by the headers alone.

    Every shard of every parameter is filled exactly once and every tensor is used, or CheckpointError lists all that
    is missing, unexpected, given twice, of a wrong shape or of a type that is not supported.
    """
    targets = tensor_targets(model)
    faults = list(files.faults)
    assignments: list[Assignment] = []
    filled_by: dict[tuple[str, ShardId], str] = {}
    ignored: list[str] = []
    for name, tensor in sorted(files.tensors.items()):
        if name not in targets:
            if _is_harmless(model, name):
                ignored.append(name)
            else:
                faults.append(f"tensor {name} in {tensor.file_name} has no place in a {model.config.architecture}")
            continue
        parameter_name, shard_id = targets[name]
        parameter = get_parameter(model, parameter_name)
        faults += _tensor_faults(tensor, expected_shape(parameter, shard_id))
        for part in [shard_id] if shard_id in parameter.shards else parameter.shards:
            other = filled_by.setdefault((parameter_name, part), name)
            if other != name:
                faults.append(f"tensors {other} and {name} both fill {parameter_name}")
        assignments.append(Assignment(tensor, parameter_name, shard_id))
    if not files.faults:  # an unreadable file's tensors are not missing
        faults += [
            f"tensor {name} is missing"
            for name, (parameter_name, shard_id) in targets.items()
            if shard_id in get_parameter(model, parameter_name).shards and (parameter_name, shard_id) not in filled_by
        ]
    if faults:
        raise CheckpointError(_fault_message(files.folder, faults))
    if ignored:
        logger.info("not needed and not read: %s", ", ".join(ignored))
    return assignments


def tensor_targets(model: CausalLM) -> dict[str, tuple[str, ShardId]]:
    """For each tensor name that a checkpoint may hold: the parameter, and its shard that the tensor is.

    A stacked parameter stands under the names of its shards and, for checkpoints that store it stacked, under its own,
    with a shard id that it does not have.
    """
    targets: dict[str, tuple[str, ShardId]] = {}
    for parameter_name, _ in model.named_parameters():
        prefix, module, kind = ("." + parameter_name).rsplit(".", 2)
        for shard_id, shard_module in model.merged_modules.get(module, {}).items():
            targets[f"{prefix}.{shard_module}.{kind}"[1:]] = (parameter_name, shard_id)
        targets[parameter_name] = (parameter_name, None)
    return targets


def get_parameter(model: nn.Module, name: str) -> ShardedParameter:
    """The parameter of a name; all parameters of a model are sharded ones."""
    parameter = model.get_parameter(name)
    if not isinstance(parameter, ShardedParameter):
        raise TypeError(f"{name} must be a ShardedParameter, not {type(parameter).__name__}")
    return parameter


def materialise(model: nn.Module, device: torch.device) -> None:
    """Put a model's parameters, zero-filled, and its buffers on a device; tied parameters stay one."""
    placed: dict[nn.Parameter, ShardedParameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in placed:
                placed[parameter] = get_parameter(module, name).materialise(device)
            setattr(module, name, placed[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def fill(model: nn.Module, assignments: Sequence[Assignment]) -> None:
    """Let each parameter take its slices."""
    for assignment in assignments:
        parameter = get_parameter(model, assignment.parameter_name)
        parameter.weight_loader(parameter, assignment.tensor, assignment.shard_id)


def _is_harmless(model: CausalLM, name: str) -> bool:
    return name.endswith(model.ignored_tensors) or (name == "lm_head.weight" and model.config.tie_word_embeddings)


def _tensor_faults(tensor: StoredTensor, shape: tuple[int, ...]) -> list[str]:
    faults = []
    where = f"tensor {tensor.name} in {tensor.file_name}"
    if tensor.shape != shape:
        faults.append(f"{where} has shape {list(tensor.shape)}, not {list(shape)}")
    if tensor.dtype_name not in STORED_DTYPES:
        faults.append(f"{where} has type {tensor.dtype_name}; only {', '.join(STORED_DTYPES)} are supported")
    return faults


def _fault_message(folder: Path, faults: Sequence[str]) -> str:
    shown = "; ".join(faults[:_MOST_FAULTS_SHOWN])
    more = f"; and {len(faults) - _MOST_FAULTS_SHOWN} more" if len(faults) > _MOST_FAULTS_SHOWN else ""
    return f"checkpoint {folder} cannot be loaded: {shown}{more}"


def _log_casts(tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
    """Say which stored types are cast; towards float16 it is a warning, since its range is the smallest."""
    stored = {tensor.dtype for tensor in tensors.values() if tensor.dtype_name in STORED_DTYPES}
    for other in sorted(stored - {dtype}, key=str):
        level = logging.WARNING if dtype == torch.float16 else logging.INFO
        logger.log(level, "weights stored as %s are cast to %s", other, dtype)
