"""Which checkpoint tensor fills which shard of which parameter: each exactly once, or the loading is refused.

It is kept from the headers of the files alone, so that a bad checkpoint is refused before memory is taken. coverage.py
keeps the other half, of what is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from paceline.model.checkpoint_files import STORED_DTYPES, CheckpointFiles, StoredTensor
from paceline.model.decoder import CausalLM
from paceline.model.parameter import LoadedTensor, ShardedParameter, ShardId, expected_shape

EMBEDDING = "model.embed_tokens.weight"
TIED_HEAD = "lm_head.weight"
"""What the embedding is called again where it is tied to the head."""
_QUANTIZATION_ENDINGS = (
    *(".qweight", ".qzeros", ".scales", ".g_idx"),  # GPTQ, AWQ
    *("_scale", "_scale_inv", "_scale_2", ".weight_packed", ".weight_shape", ".zero_point"),  # fp8, compressed-tensors
    *(".absmax", ".quant_map", ".SCB"),  # bitsandbytes
)
"""Of tensors that go with quantised ones, to say so where a config.json does not."""


@dataclass(frozen=True)
class Assignment:
    """One tensor that fills one shard of a parameter, or all of them where shard_id is not among its shards."""

    tensor: LoadedTensor
    parameter_name: str
    shard_id: ShardId


class Ledger:
    """Enters a checkpoint's tensors one by one and collects every fault, to report them together."""

    def __init__(self, model: CausalLM) -> None:
        self.assignments: list[Assignment] = []
        self.ignored: list[str] = []
        """Tensors that the model does not need, as its family knows."""
        self.tied_head: StoredTensor | None = None
        """Of a checkpoint that holds a head beside the embedding to which config.json ties it."""
        self._model = model
        self._parameters = sharded_parameters(model)
        self._targets = tensor_targets(model)
        self._filled_by: dict[tuple[str, ShardId], str] = {}
        self._faults: list[str] = []

    def enter(self, tensor: StoredTensor) -> None:
        """Assign a tensor to the shard that its name stands for."""
        if tensor.name in self._targets:
            self._assign(tensor, *self._targets[tensor.name])
        elif tensor.name == TIED_HEAD and self._model.config.tie_word_embeddings:
            self.tied_head = tensor
            self._check_form(tensor, expected_shape(self._parameters[EMBEDDING], None))
        elif tensor.name.endswith(self._model.ignored_tensors):
            self.ignored.append(tensor.name)
        else:
            architecture = self._model.config.architecture
            hint = " (it belongs to a quantised checkpoint)" if tensor.name.endswith(_QUANTIZATION_ENDINGS) else ""
            self._faults.append(f"tensor {tensor.name} in {tensor.file_name} has no place in a {architecture}{hint}")

    def faults(self, files: CheckpointFiles) -> list[str]:
        """All faults, those of the files first; empty where every shard is filled once and all tensors fit.

        A tensor that may be in a file with a fault is not called missing.
        """
        missing = [
            self._absence(name, *target)
            for name, target in self._targets.items()
            # The parameter's own name is that of its tensors stored as one.
            if self._is_empty(*target) and not files.may_hold(name) and not files.may_hold(target[0])
        ]
        return [*files.faults, *self._faults, *missing]

    def _absence(self, name: str, parameter_name: str, shard_id: ShardId) -> str:
        shape = list(expected_shape(self._parameters[parameter_name], shard_id))
        return f"tensor {name} of shape {shape} is missing"

    def _assign(self, tensor: StoredTensor, parameter_name: str, shard_id: ShardId) -> None:
        parameter = self._parameters[parameter_name]
        self._check_form(tensor, expected_shape(parameter, shard_id))
        for part in [shard_id] if shard_id in parameter.shards else parameter.shards:
            other = self._filled_by.setdefault((parameter_name, part), tensor.name)
            if other != tensor.name:
                self._faults.append(f"tensors {other} and {tensor.name} both fill {parameter_name}")
        self.assignments.append(Assignment(tensor, parameter_name, shard_id))

    def _check_form(self, tensor: StoredTensor, expected: tuple[int, ...]) -> None:
        """The full shape, and a type that can be read."""
        where = f"tensor {tensor.name} in {tensor.file_name}"
        if tensor.shape != expected:
            self._faults.append(f"{where} has shape {list(tensor.shape)}, not {list(expected)}")
        if tensor.entry.dtype_name not in STORED_DTYPES:
            supported = ", ".join(STORED_DTYPES)
            self._faults.append(f"{where} has type {tensor.entry.dtype_name}; only {supported} are supported")

    def _is_empty(self, parameter_name: str, shard_id: ShardId) -> bool:
        """Whether this is a shard that nothing fills; a parameter's stacked form is none of its shards."""
        is_shard = shard_id in self._parameters[parameter_name].shards
        return is_shard and (parameter_name, shard_id) not in self._filled_by


def tensor_targets(model: CausalLM) -> dict[str, tuple[str, ShardId]]:
    """For each tensor name that a checkpoint may hold: the parameter, and its shard that the tensor is.

    A stacked parameter stands under the names of its shards and, for checkpoints that store it stacked, under its own,
    with a shard id that it does not have.
    """
    targets: dict[str, tuple[str, ShardId]] = {}
    for parameter_name, _ in model.named_parameters():
        *prefix, module, kind = parameter_name.split(".")
        for shard_id, shard_module in model.merged_modules.get(module, {}).items():
            targets[".".join([*prefix, shard_module, kind])] = (parameter_name, shard_id)
        targets[parameter_name] = (parameter_name, None)
    return targets


def get_parameter(model: nn.Module, name: str) -> ShardedParameter:
    """The parameter of a name; TypeError where a layer was built with one that does not know its shards."""
    return _sharded(name, model.get_parameter(name))


def sharded_parameters(model: nn.Module) -> dict[str, ShardedParameter]:
    """All parameters by name, tied ones once; TypeError as of get_parameter, which takes longer for each."""
    return {name: _sharded(name, parameter) for name, parameter in model.named_parameters()}


def _sharded(name: str, parameter: nn.Parameter) -> ShardedParameter:
    if not isinstance(parameter, ShardedParameter):
        raise TypeError(f"{name} must be a ShardedParameter, not {type(parameter).__name__}")
    return parameter
