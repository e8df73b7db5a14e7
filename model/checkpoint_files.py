"""The safetensors files of a checkpoint folder: headers at once, elements only as they are asked for.

Which files count: where there is a model.safetensors.index.json, the (tensor, file) pairs that it names and nothing
else; where there is none, every *.safetensors of the folder. Other formats (.bin, .pt) are never read, since reading
them runs code. Beside a model.safetensors that the index does not name there are two checkpoints, of which
transformers takes the single file and others the index: that is refused, unless the index's files are gone.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from paceline.model.errors import CheckpointError
from paceline.model.json_text import printable
from paceline.model.mapped_columns import MappedFile
from paceline.model.parameter import Box
from paceline.model.regular_files import open_regular
from paceline.model.safetensors_header import HeaderError, TensorEntry, read_header
from paceline.model.weight_index import INDEX_NAME, read_weight_map, refusal_of_name

SINGLE_NAME = "model.safetensors"
STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


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
        """Raises CheckpointError where the folder has no weights, or two checkpoints, or its index cannot be read.

        What is wrong with single files is put into `faults`, to be reported with everything else.
        """
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.faults: list[str] = []
        self.notes: list[str] = []
        """What lies in the folder and is not read, in lines for people."""
        self._unseen: set[str] = set()
        """Tensors that the index or a header names, in files that cannot be read or lack them."""
        self._any_unknown = False
        """Whether there is a file of which neither says what it holds."""
        self._open_files = ExitStack()
        self._sizes: dict[str, tuple[int, int]] = {}
        """Of each file when it was opened, beside its descriptor."""
        index = folder / INDEX_NAME
        weight_map = read_weight_map(index) if index.exists() else None
        if weight_map is not None and self._is_meant(weight_map):
            self._open_indexed(weight_map)
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

    def may_hold(self, tensor_name: str) -> bool:
        """Whether a tensor that was not found may be in a file that has a fault, which then is what is to be told.

        A model.safetensors that can be read has all tensors of a checkpoint that has no index.
        """
        return tensor_name in self._unseen or (self._any_unknown and SINGLE_NAME not in self._sizes)

    def _is_meant(self, weight_map: Mapping[str, str]) -> bool:
        """Whether it is the index that says what the checkpoint is; CheckpointError where nobody can know."""
        names = sorted(set(weight_map.values()))
        if SINGLE_NAME in names or not (self.folder / SINGLE_NAME).exists():
            return True
        there = [name for name in names if refusal_of_name(name) is None and (self.folder / name).exists()]
        if not there:
            self.notes.append(f"not read, since none of the files that it names is there: {INDEX_NAME}")
            return False
        shown = there[0] if len(there) == 1 else f"{there[0]} to {there[-1]}"
        raise CheckpointError(
            f"{self.folder} holds two checkpoints, {SINGLE_NAME} and the files of {INDEX_NAME} ({shown}); delete "
            f"{SINGLE_NAME}, or {INDEX_NAME} and its files"
        )

    def _open_indexed(self, weight_map: Mapping[str, str]) -> None:
        tensors_of: dict[str, list[str]] = defaultdict(list)
        for tensor_name, file_name in weight_map.items():
            tensors_of[file_name].append(tensor_name)
        for file_name, tensor_names in sorted(tensors_of.items()):
            refusal = refusal_of_name(file_name)
            stored: dict[str, StoredTensor] | None = None
            if refusal:
                self.faults.append(f"{INDEX_NAME} names the file {file_name!r}, which {refusal}")
            else:
                stored = self._open(file_name)
            for tensor_name in sorted(tensor_names):
                if stored is not None and tensor_name in stored:
                    self.tensors[tensor_name] = stored[tensor_name]
                    continue
                self._unseen.add(tensor_name)
                if stored is not None:
                    self.faults.append(f"{INDEX_NAME} puts tensor {tensor_name} into {file_name}, which lacks it")
        self._any_unknown = False  # the index has said what files hold, whatever is in them
        stray = sorted(path.name for path in self.folder.glob("*.safetensors") if path.name not in tensors_of)
        if stray:
            shown = ", ".join(map(printable, stray))
            self.notes.append(f"not read, since {INDEX_NAME} does not name them: {shown}")

    def _open_all(self) -> None:
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.folder} has no *.safetensors files, the only format of weights that is read")
        for path in paths:
            for tensor_name, tensor in (self._open(path.name) or {}).items():
                if tensor_name in self.tensors:
                    other = printable(self.tensors[tensor_name].file_name)
                    self.faults.append(f"tensor {tensor_name} is in both {other} and {printable(path.name)}")
                self.tensors[tensor_name] = tensor

    def _open(self, file_name: str) -> dict[str, StoredTensor] | None:
        """The tensors of one file; None, and a fault, where it cannot be read."""
        try:
            file = self._open_files.enter_context(open_regular(self.folder / file_name))
            entries = read_header(file)
            mapped = self._open_files.enter_context(MappedFile(file.fileno()))
            self._sizes[file_name] = (file.fileno(), os.fstat(file.fileno()).st_size)
            return {entry.name: StoredTensor(entry, file_name, file.fileno(), mapped) for entry in entries}
        except OSError as error:
            self.faults.append(f"{printable(file_name)} cannot be opened: {error.strerror or error}")
            self._any_unknown = True
        except HeaderError as error:
            self.faults.append(f"{printable(file_name)} {error}")
            self._any_unknown |= error.names is None
            self._unseen |= error.names or frozenset()
        return None
