"""The tensors of a checkpoint as the safetensors library understands them, for who does not want to ask the loader."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from paceline.model.checkpoint_files import CheckpointFiles
from paceline.model.errors import CheckpointError
from paceline.model.regular_files import open_regular

_AGAIN = "cannot be read again (verify it once nobody writes to it)"
_LENGTH_BYTES = 8
_PIECE_BYTES = 16 << 20
"""Read at a time, so that a tensor is not in memory once more than the library itself needs."""


class CheckpointTensors:
    """The full tensors of a checkpoint folder by name; a context.

    Nothing is opened before it is asked for. A tensor's bytes are read, and handed to the library as a file of their
    own: the library itself maps files, and one that is cut meanwhile would end the process (SIGBUS). What cannot be
    read is a CheckpointError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files = ExitStack()
        self._opened: dict[str, tuple[BinaryIO, int, dict[str, Any]]] = {}
        """By file name: the file, the byte at which its tensors begin, its header."""

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._open_files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        file_name = self._file_of[name]
        try:
            if file_name not in self._opened:
                self._opened[file_name] = self._open(file_name)
            return _read(*self._opened[file_name], name)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"tensor {name} in {file_name} {_AGAIN}: {error}") from error

    @cached_property
    def _file_of(self) -> dict[str, str]:
        with CheckpointFiles(self._folder) as files:
            if files.faults:
                raise CheckpointError(f"checkpoint {self._folder} {_AGAIN}: {files.faults[0]}")
            return {name: tensor.file_name for name, tensor in files.tensors.items()}

    def _open(self, file_name: str) -> tuple[BinaryIO, int, dict[str, Any]]:
        file = self._open_files.enter_context(open_regular(self._folder / file_name))
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return file, _LENGTH_BYTES + length, json.loads(file.read(length))


def _read(file: BinaryIO, data_begin: int, header: dict[str, Any], name: str) -> torch.Tensor:
    begin, end = header[name]["data_offsets"]
    alone = json.dumps({name: {**header[name], "data_offsets": [0, end - begin]}}).encode()
    content = BytesIO()
    content.write(len(alone).to_bytes(_LENGTH_BYTES, "little") + alone)
    file.seek(data_begin + begin)
    left = end - begin
    while left:
        piece = file.read(min(left, _PIECE_BYTES))
        if not piece:
            raise ValueError("the file ends before it")
        left -= content.write(piece)
    tensor: torch.Tensor = load_safetensors(content.getvalue())[name]
    return tensor
