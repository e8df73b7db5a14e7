"""The safetensors files of a checkpoint folder: headers at once, elements only as they are asked for.

Which files count: where there is a model.safetensors.index.json, the (tensor, file) pairs that it names and nothing
else; where there is none, every *.safetensors of the folder. Other formats (.bin, .pt) are never read, since reading
them runs code.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from paceline.model.errors import CheckpointError
from paceline.model.mapped_columns import MappedFile
from paceline.model.parameter import Box
from paceline.model.safetensors_header import (
    HeaderError,
    TensorEntry,
    check_is_no_pointer,
    read_header,
    unique_names,
)

INDEX_NAME = "model.safetensors.index.json"
STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Where some tools put the method that others put into config.json."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of an open file."""

    entry: TensorEntry
    file_name: str
    _descriptor: int = field(repr=False)
    _mapped: MappedFile = field(repr=False)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        """Raises KeyError for a type that is not in STORED_DTYPES."""
        return STORED_DTYPES[self.entry.dtype_name]

    def read(self, box: Box, buffer: torch.Tensor) -> torch.Tensor:
        """Read one box of a matrix or vector into a buffer of uint8, and nothing else; the result is a view of it.

        Raises CheckpointError as StoredBox.read_rows does.
        """
        extents = [part.stop - part.start for part in box]
        staged = buffer[: math.prod(extents) * self.dtype.itemsize]
        self.box(box).read_rows(0, staged.numpy())
        return staged.view(self.dtype).view(extents)

    def box(self, box: Box) -> StoredBox:
        """One box of a matrix or vector, to be read in any number of parts."""
        rows, *columns = box
        item = self.dtype.itemsize
        pitch = math.prod(self.shape[1:]) * item
        first = self.entry.begin + rows.start * pitch + sum(part.start for part in columns) * item
        width = math.prod(part.stop - part.start for part in columns) * item
        where = f"tensor {self.name} in {self.file_name}"
        return StoredBox(first, pitch, width, where, self._descriptor, self._mapped)


class StoredBox:
    """A box of a stored tensor; what can be worked out before is, since threads that read take turns at the rest."""

    __slots__ = ("_descriptor", "_first", "_mapped", "_pitch", "_where", "_width")

    def __init__(self, first: int, pitch: int, width: int, where: str, descriptor: int, mapped: MappedFile) -> None:
        """The first byte in the file; bytes from row to row and of a row's part; the tensor, for people."""
        self._first = first
        self._pitch = pitch
        self._width = width
        self._where = where
        self._descriptor = descriptor
        self._mapped = mapped

    def read_rows(self, start: int, memory: npt.NDArray[np.uint8]) -> None:
        """Fill memory, which is some rows' size, from that row of the box on; no torch is called.

        Raises CheckpointError where the file cannot be read, or ends before.
        """
        first = self._first + start * self._pitch
        if self._width == self._pitch:
            self._read_range(first, memory.data)
        elif not self._mapped.copy_columns(first, self._pitch, memory.reshape(-1, self._width)):
            for row, part in enumerate(memory.reshape(-1, self._width)):
                self._read_range(first + row * self._pitch, part.data)

    def _read_range(self, offset: int, memory: memoryview) -> None:
        """Fill memory from the file; the system may give less than it was asked for, and 0 at the end of the file."""
        while memory:
            try:
                count = os.preadv(self._descriptor, [memory], offset)
            except OSError as error:
                raise CheckpointError(f"{self._where} cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self._where} cannot be read: the file ends before it")
            memory, offset = memory[count:], offset + count


class CheckpointFiles:
    """All tensors of a checkpoint by name, and the faults of its files; a context that keeps the files open."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where the folder has no weights, its index cannot be read, or it is quantised.

        What is wrong with single files is put into `faults`, to be reported with everything else.
        """
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.faults: list[str] = []
        self.stray: list[str] = []
        """Files that the index does not name."""
        self._open_files = ExitStack()
        self._sizes: dict[str, tuple[int, int]] = {}
        """Of each file when it was opened, beside its descriptor."""
        _refuse_quantized(folder)
        index = folder / INDEX_NAME
        if index.exists():
            self._open_indexed(index)
        else:
            self._open_all()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()

    def cuts(self) -> list[str]:
        """Faults of files that have become shorter: what is mapped of a last page beyond their end reads as zeros."""
        return [
            f"{name} was cut while it was read"
            for name, (descriptor, size) in self._sizes.items()
            if os.fstat(descriptor).st_size < size
        ]

    def _open_indexed(self, index: Path) -> None:
        tensors_of: dict[str, list[str]] = defaultdict(list)
        for tensor_name, file_name in _read_weight_map(index).items():
            tensors_of[file_name].append(tensor_name)
        for file_name, tensor_names in sorted(tensors_of.items()):
            refusal = _refusal_of_name(file_name)
            if refusal:
                self.faults.append(f"{INDEX_NAME} names the file {file_name!r}, which {refusal}")
                continue
            stored = self._open(file_name)
            if stored is None:
                continue
            for tensor_name in sorted(tensor_names):
                if tensor_name in stored:
                    self.tensors[tensor_name] = stored[tensor_name]
                else:
                    self.faults.append(f"{INDEX_NAME} puts tensor {tensor_name} into {file_name}, which lacks it")
        self.stray = sorted(path.name for path in self.folder.glob("*.safetensors") if path.name not in tensors_of)

    def _open_all(self) -> None:
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.folder} has no *.safetensors files, the only format of weights that is read")
        for path in paths:
            for tensor_name, tensor in (self._open(path.name) or {}).items():
                if tensor_name in self.tensors:
                    other = self.tensors[tensor_name].file_name
                    self.faults.append(f"tensor {tensor_name} is in both {other} and {path.name}")
                self.tensors[tensor_name] = tensor

    def _open(self, file_name: str) -> dict[str, StoredTensor] | None:
        """The tensors of one file; None, and a fault, where it cannot be read."""
        try:
            file = self._open_files.enter_context((self.folder / file_name).open("rb"))
            entries = read_header(file)
            mapped = self._open_files.enter_context(MappedFile(file.fileno()))
            self._sizes[file_name] = (file.fileno(), os.fstat(file.fileno()).st_size)
            return {entry.name: StoredTensor(entry, file_name, file.fileno(), mapped) for entry in entries}
        except OSError as error:
            self.faults.append(f"{file_name} cannot be opened: {error.strerror or error}")
        except HeaderError as error:
            self.faults.append(f"{file_name} {error}")
        return None


def _read_weight_map(index: Path) -> dict[str, str]:
    """The index's tensor names, each with the name of its file."""
    try:
        content = index.read_bytes()
        check_is_no_pointer(content)
        weight_map = json.loads(content, object_pairs_hook=unique_names)["weight_map"]
    except HeaderError as error:
        raise CheckpointError(f"{index} {error}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{index} cannot be read as a safetensors index: {error!r}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must give a file name for each tensor")
    return weight_map


def _refusal_of_name(file_name: str) -> str | None:
    """Why a file that an index names is not opened."""
    path = PurePosixPath(file_name)
    if path.is_absolute() or ".." in path.parts:
        return "is outside the folder"
    if path.suffix != ".safetensors":
        return "is not a .safetensors file, the only format of weights that is read"
    return None


def _refuse_quantized(folder: Path) -> None:
    """Raise CheckpointError where a file beside the weights says that they are quantised, and how."""
    for name in QUANTIZATION_FILES:
        path = folder / name
        if not path.exists():
            continue
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        fields = content.get("quantization", content) if isinstance(content, dict) else {}
        method = next((fields[key] for key in ("quant_method", "quant_algo", "version") if fields.get(key)), None)
        method = method or ("gptq" if name == "quantize_config.json" else "unknown")
        raise CheckpointError(f"{path}: quantization {method!r} is not supported; use the unquantized checkpoint")
