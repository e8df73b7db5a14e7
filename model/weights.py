"""From a checkpoint folder to one rank's model: check everything, take memory, then read this rank's slices.

Ranks see the same headers and so find the same faults in them. What only one rank can find, in the elements it reads,
it tells the others through a StopFlag. docs/loading.md has the rules.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from paceline.model.checkpoint_files import CheckpointFiles
from paceline.model.communicator import Communicator
from paceline.model.config import ModelConfig
from paceline.model.coverage import Coverage
from paceline.model.decoder import CausalLM
from paceline.model.dummy_tensors import DummyTensor
from paceline.model.errors import CheckpointError
from paceline.model.finite_values import get_ready
from paceline.model.garbage import without_collector
from paceline.model.ledger import Assignment, Ledger, sharded_parameters, tensor_targets
from paceline.model.parameter import Copy, ShardedParameter
from paceline.model.registry import MODEL_CLASSES
from paceline.model.shard_reader import ShardReader, StopFlag
from paceline.model.staging import StagingMemory
from paceline.model.tied_head import TiedHeadCheck

logger = logging.getLogger(__name__)

_MOST_FAULTS_SHOWN = 10


@without_collector()
def load_model(
    folder: Path | str,
    config: ModelConfig,
    comm: Communicator,
    staging: StagingMemory,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    load_format: str = "safetensors",
    stop: StopFlag | None = None,
) -> CausalLM:
    """This rank's shard of the model, on the device of the staging memory and ready to run.

    The staging memory is used once. Whoever loads beside other ranks leaves its context when all are through.

    load_format `dummy` takes random weights, the same at any number of ranks, and reads no file. `stop` is set once
    this rank meets a fault in the elements it reads, and ends the reading soon once another rank has set it.

    Raises CheckpointError with the faults of the checkpoint in one line (all of them are logged where that has not room
    for them), LoadingStopped where only other ranks met any, and ModelConfigError where the rope type does not reach
    max_model_len.
    """
    if staging.device.type == "cuda":  # takes the driver about as long as it takes to build the model
        threading.Thread(target=get_ready, args=(staging.device, dtype), name="get-ready").start()
    model = MODEL_CLASSES[config.architecture](config, comm, dtype, max_model_len)
    stop = stop or threading.Event()
    if load_format == "dummy":
        faults = _fill(model, _dummy_assignments(model, dtype, staging.device), comm, staging, stop)
    else:
        with CheckpointFiles(Path(folder)) as files:
            faults = _load_files(model, files, comm, dtype, staging, stop)
    if faults:
        raise _refusal(faults, folder, f"rank {comm.rank}: " if comm.size > 1 else "")
    model.place_table(staging.device)
    return model


def _refusal(faults: Sequence[str], folder: Path | str, whose: str | None) -> CheckpointError:
    """An error with the first faults; all are logged where there are more, after whose they are (None: not here)."""
    shown = "; ".join(faults[:_MOST_FAULTS_SHOWN])
    more = len(faults) - _MOST_FAULTS_SHOWN
    if more > 0:
        shown = f"{shown}; and {more} more"
        for fault in faults if whose is not None else ():
            logger.error("%s%s", whose, fault)
    return CheckpointError(f"checkpoint {folder} cannot be loaded: {shown}")


def _load_files(
    model: CausalLM,
    files: CheckpointFiles,
    comm: Communicator,
    dtype: torch.dtype,
    staging: StagingMemory,
    stop: StopFlag,
) -> list[str]:
    """Read this rank's parts where the headers have no fault, else raise CheckpointError; the faults met then."""
    ledger = Ledger(model)
    # In the order of their bytes, in which they are then read.
    for tensor in sorted(files.tensors.values(), key=lambda tensor: (tensor.file_name, tensor.entry.begin)):
        ledger.enter(tensor)
    if faults := ledger.faults(files):
        raise _refusal(faults, files.folder, "" if comm.rank == 0 else None)  # every rank has found the same
    if comm.rank == 0:
        _log_choices(files, ledger, dtype)
    faults = _fill(model, ledger.assignments, comm, staging, stop)
    if ledger.tied_head is not None and not faults:
        faults = TiedHeadCheck(model, ledger.tied_head, comm.rank, staging, stop).run()
        if comm.rank == 0 and not faults:
            logger.info("%s is the embedding again, to which it is tied: not kept", ledger.tied_head.name)
    return faults + files.cuts()


def _dummy_assignments(model: CausalLM, dtype: torch.dtype, device: torch.device) -> list[Assignment]:
    """Random tensors for every shard, under the names that a checkpoint has."""
    assignments = []
    parameters = sharded_parameters(model)
    for name, (parameter_name, shard_id) in tensor_targets(model).items():
        shards = parameters[parameter_name].shards
        if shard_id in shards:
            tensor = DummyTensor(name, shards[shard_id].full_shape, dtype, device)
            assignments.append(Assignment(tensor, parameter_name, shard_id))
    return assignments


def _fill(
    model: CausalLM,
    assignments: Sequence[Assignment],
    comm: Communicator,
    staging: StagingMemory,
    stop: StopFlag,
) -> list[str]:
    """Take memory and read each parameter's parts into it; the faults met, none where each element was written once."""
    _materialise(model, staging.device)
    parameters = sharded_parameters(model)
    copies = [copy for assignment in assignments for copy in _copies(parameters[assignment.parameter_name], assignment)]
    coverage = Coverage(model)
    total = sum(copy.num_bytes for copy in copies)
    start = time.perf_counter()
    with _progress_of(total, is_shown=comm.rank == 0 and sys.stderr.isatty()) as on_bytes:
        faults = ShardReader(copies, staging, coverage, stop, on_bytes).run()
    seconds = time.perf_counter() - start
    if comm.rank == 0 and not faults:
        logger.info("loaded %.3f GB in %.2f s (%.2f GB/s)", total / 1e9, seconds, total / 1e9 / seconds)
    return faults or coverage.faults()


@contextmanager
def _progress_of(total: int, is_shown: bool) -> Iterator[Callable[[int], object]]:
    """A bar that is told of new bytes; a hidden one would begin a thread and take milliseconds too."""
    if not is_shown:
        yield lambda _: None
        return
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update


def _copies(parameter: ShardedParameter, assignment: Assignment) -> Iterator[Copy]:
    return parameter.weight_loader(parameter, assignment.tensor, assignment.shard_id)


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Put a model's parameters on a device, yet to be written; tied ones stay one."""
    _reserve(sum(parameter.nbytes for parameter in model.parameters()), device)
    placed: dict[nn.Parameter, ShardedParameter] = {}
    for sharded in sharded_parameters(model).values():
        placed[sharded] = sharded.materialise(device)
    for module in model.modules():
        # Not named_parameters, which takes longer than everything else here together.
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = placed[parameter]


def _reserve(num_bytes: int, device: torch.device) -> None:
    """Ask the driver for memory once, instead of for each parameter: torch cuts them from what it then holds."""
    if device.type == "cuda":
        torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _log_choices(files: CheckpointFiles, ledger: Ledger, dtype: torch.dtype) -> None:
    """Say what is not read, and which types are cast; to float16 with a warning, since its range is the smallest."""
    for note in files.notes:
        logger.info("%s", note)
    if ledger.ignored:
        logger.info("not needed and not read: %s", ", ".join(ledger.ignored))
    level = logging.WARNING if dtype == torch.float16 else logging.INFO
    for stored in sorted({assignment.tensor.dtype for assignment in ledger.assignments} - {dtype}, key=str):
        names = [str(each).removeprefix("torch.") for each in (stored, dtype)]
        logger.log(level, "weights stored as %s are cast to %s", *names)
