"""The header of a safetensors file: what it holds and where, checked against the file before anything is read.

Format: https://huggingface.co/docs/safetensors. A file is the header's length (8 bytes, little-endian), the header (a
JSON object) and the tensors' bytes, row by row, without holes and to the end of the file.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, BinaryIO

from paceline.model.json_text import parse_json

_LFS_MAGIC = b"version https://git-lfs"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}


class HeaderError(ValueError):
    """A file that is no whole safetensors file; the message goes on from the file's name."""

    names: frozenset[str] | None = None
    """Of the tensors that the file should hold, where the header itself can be read."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype_name: str
    """As the format spells it, such as BF16 or F8_E4M3."""
    shape: tuple[int, ...]
    begin: int
    """Byte of the file at which its elements start."""
    end: int


def read_header(file: BinaryIO) -> list[TensorEntry]:
    """The tensors of an open file in the order of their bytes; HeaderError where header and file do not agree."""
    file_bytes = os.fstat(file.fileno()).st_size
    content, data_begin = _read_json(file, file_bytes)
    content.pop("__metadata__", None)
    entries = sorted((_entry(name, fields, data_begin) for name, fields in content.items()), key=_place)
    try:
        _check_bytes(entries, data_begin, file_bytes)
    except HeaderError as error:
        error.names = frozenset(entry.name for entry in entries)
        raise
    return entries


def check_is_no_pointer(start: bytes) -> None:
    """Raise HeaderError where a file's first bytes are those of a Git LFS pointer, which stands for the file itself."""
    if start.startswith(_LFS_MAGIC):
        raise HeaderError("is a Git LFS pointer; fetch the file itself with git lfs pull")


def _read_json(file: BinaryIO, file_bytes: int) -> tuple[dict[str, Any], int]:
    """The header, and the byte of the file at which the tensors begin."""
    start = file.read(len(_LFS_MAGIC))
    check_is_no_pointer(start)
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    data_begin = _LENGTH_BYTES + length
    if len(start) < _LENGTH_BYTES or length > _MOST_HEADER_BYTES:
        raise HeaderError("is not a safetensors file")
    if data_begin > file_bytes:
        raise HeaderError(f"is cut short: its header alone takes {data_begin} bytes, and the file has {file_bytes}")
    file.seek(_LENGTH_BYTES)
    try:
        content = parse_json(file.read(length))
    except ValueError as error:
        raise HeaderError(f"is not a safetensors file: its header cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise HeaderError("is not a safetensors file: its header is no JSON object")
    return content, data_begin


def _entry(name: str, fields: Any, data_begin: int) -> TensorEntry:
    if not name.isprintable():  # no library writes such a name, and no message could show it
        raise HeaderError(f"is damaged: its header names a tensor {name!a}, which is not printable")
    try:
        dtype_name, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        numbers = [*shape, begin, end]
        valid = isinstance(dtype_name, str) and all(type(number) is int and number >= 0 for number in numbers)
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise HeaderError(f"is damaged: its header does not give type, shape and offsets of {name}")
    entry = TensorEntry(name, dtype_name, tuple(shape), data_begin + begin, data_begin + end)
    if dtype_name in _ITEM_BYTES and end - begin != math.prod(shape) * _ITEM_BYTES[dtype_name]:
        raise HeaderError(f"is damaged: its header gives {end - begin} bytes to {name}, {dtype_name} {shape}")
    return entry


def _place(entry: TensorEntry) -> tuple[int, int]:
    return entry.begin, entry.end


def _check_bytes(entries: list[TensorEntry], data_begin: int, file_bytes: int) -> None:
    """Each byte after the header belongs to one tensor."""
    position = data_begin
    for entry in entries:
        if entry.begin != position:
            raise HeaderError(f"is damaged: the bytes of {entry.name} do not follow those of the tensor before it")
        position = entry.end
    if file_bytes < position:
        raise HeaderError(f"is cut short: it has {file_bytes} bytes, and its header speaks of {position}")
    if file_bytes > position:
        raise HeaderError(f"is damaged: it has {file_bytes} bytes, and its header speaks of {position}")
