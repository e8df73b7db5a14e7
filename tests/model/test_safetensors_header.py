"""A header is checked against its file before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.model.safetensors_header import HeaderError, TensorEntry, read_header


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: str, data: bytes = b"") -> Path:
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)
    return path


def read(path: Path) -> list[TensorEntry]:
    with path.open("rb") as file:
        return read_header(file)


def test_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "matrix": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "vector": torch.arange(5, dtype=torch.float32),
        "fp8": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    entries = {each.name: each for each in read(path)}
    assert entries.keys() == tensors.keys()
    content = path.read_bytes()
    for name, tensor in tensors.items():
        found = entries[name]
        assert found.shape == tuple(tensor.shape)
        assert content[found.begin : found.end] == bytes(tensor.view(torch.uint8).flatten().tolist())
    assert {name: each.dtype_name for name, each in entries.items()} == {
        "matrix": "BF16",
        "vector": "F32",
        "fp8": "F8_E4M3",
        "empty": "F32",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a safetensors file"),
        (b"PK\x03\x04 a zip file, as torch.save writes", "is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ((1000).to_bytes(8, "little") + b"{}", "is cut short: its header alone takes 1008 bytes, and the file has 10"),
    ],
)
def test_other_files(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(HeaderError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ("{", b"", "header cannot be read"),
        ("[]", b"", "header is no JSON object"),
        ('{"a": {}, "a": {}}', b"", "gives a twice"),
        ('{"a": 1}', b"", "does not give type, shape and offsets of a"),
        (json.dumps({"a": entry([-1], 0, 4)}), b"1234", "does not give type, shape and offsets of a"),
        (json.dumps({"a": entry([2], 0, 4)}), b"1234", "gives 4 bytes to a, F32"),
        (json.dumps({"a": entry([2], 0, 8)}), b"1234", "is cut short: it has 73 bytes, and its header speaks of 77"),
        (json.dumps({"a": entry([1], 0, 4)}), b"12345", "is damaged: it has 74 bytes, and its header speaks of 73"),
        (json.dumps({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}), b"1234", "the bytes of b do not follow"),
        (json.dumps({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}), b"1" * 12, "the bytes of b do not follow"),
    ],
)
def test_damaged_headers(header: str, data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match=message):
        read(write(tmp_path / "a.safetensors", header, data))
