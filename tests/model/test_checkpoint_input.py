"""Files of a folder that are no files, and JSON that no program writes: one line that names the file and the place."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.errors import CheckpointError
from paceline.model.json_text import parse_json
from paceline.model.regular_files import open_regular
from paceline.model.safetensors_header import HeaderError, read_header
from paceline.model.staging import StagingMemory
from paceline.model.weight_index import INDEX_NAME
from paceline.model.weights import load_model

DEEP = 100_000
"""Levels that neither Python's parser nor its stack has room for."""


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    """A test that would wait for ever fails."""

    def give_up(*_: object) -> None:
        raise TimeoutError("opened something that nobody writes to")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def message(folder: Path) -> str:
    with StagingMemory(torch.device("cpu"), 1) as staging, pytest.raises(CheckpointError) as error:
        load_model(folder, ModelConfig.from_folder(folder), SingleRank(), staging, torch.float32, max_model_len=64)
    text = str(error.value)
    assert "\n" not in text
    text.encode()  # no half characters
    return text


def make_socket(path: Path) -> None:
    """Bound by a name within its folder, since a socket's address has room for few characters."""
    before = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(before)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors", INDEX_NAME])
def test_what_is_no_regular_file_is_not_opened(name: str, kind: str, own_tiny: Callable) -> None:
    folder = own_tiny().folder
    (folder / name).unlink(missing_ok=True)
    NO_FILES[kind](folder / name)
    assert message(folder).endswith(f"{name} cannot be opened: it is not a regular file")


def test_a_file_that_the_index_names_is_not_opened_either(own_tiny: Callable) -> None:
    folder = own_tiny().folder
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "part.safetensors")
    (folder / INDEX_NAME).write_text('{"weight_map": {"model.norm.weight": "part.safetensors"}}')
    assert "part.safetensors cannot be opened: it is not a regular file; tensor" in message(folder)


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").symlink_to("a")
    with open_regular(tmp_path / "b") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": ' + "[" * DEEP, "it is nested too deeply: line 1 column 106 (char 105)"),
        ('{"a":\n' + '{"b[": ' * DEEP, "it is nested too deeply: line 2 column 694 (char 699)"),
        ('{"a": "[\\"[' + "[" * DEEP + '"}', ""),
        ("[" + "[[]]," * DEEP + "0]", ""),
        ('{"a":\n 1' + "0" * 5000 + "}", "a number of 5001 digits: line 2 column 2 (char 7)"),
        ('{"a": [1, -100000000000000000000]}', "a number of 22 digits: line 1 column 11 (char 10)"),
        ('{"a": [18446744073709551615, -9223372036854775808]}', ""),
        ('{"a": 1, "a": 2}', "it gives a twice"),
        ('{"\\u0000": 1, "\\u0000": 2}', r"it gives '\x00' twice"),
        ('{"a" 1}', "Expecting ':' delimiter: line 1 column 6 (char 5)"),
    ],
)
def test_the_place_of_a_fault_in_a_text(text: str, problem: str) -> None:
    if not problem:
        assert parse_json(text.encode()) == json.loads(text)
        return
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        parse_json(text.encode())


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(ValueError, match="0xed in position 6"):
        parse_json(b'{"a": \xed\xa0\x80}')


INDEX_FAULTS = {
    "nested": ("[" * DEEP, "cannot be read as a safetensors index: it is nested too deeply: line 1 column 101"),
    "nested in what is not needed": (
        '{"weight_map": {}, "metadata": ' + "[" * DEEP + "]" * DEEP + "}",
        "cannot be read as a safetensors index: it is nested too deeply: line 1 column 131 (char 130)",
    ),
    "a long number": (
        '{"weight_map": {"a": 1' + "0" * 5000 + "}}",
        "cannot be read as a safetensors index: a number of 5001 digits: line 1 column 22 (char 21)",
    ),
    "NUL in a file": (
        r'{"weight_map": {"a": "a\u0000b.safetensors"}}',
        rf"{INDEX_NAME} names the file 'a\x00b.safetensors', which is not printable",
    ),
    "half a character in a file": (
        r'{"weight_map": {"a": "\ud800.safetensors"}}',
        rf"{INDEX_NAME} names the file '\ud800.safetensors', which is not printable",
    ),
    "NUL in a tensor": (r'{"weight_map": {"a\u0000": "a.safetensors"}}', r"names a tensor 'a\x00', which is not print"),
    "half a character in a tensor": (r'{"weight_map": {"\udfff": "a.safetensors"}}', r"names a tensor '\udfff', which"),
    "a control sequence in a tensor": (
        r'{"weight_map": {"\u001b[31m\n": "a.safetensors"}}',
        r"names a tensor '\x1b[31m\n', which is not printable",
    ),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_an_index_that_no_program_writes(fault: str, own_tiny: Callable) -> None:
    folder = own_tiny().folder
    (folder / "model.safetensors").unlink()
    text, problem = INDEX_FAULTS[fault]
    (folder / INDEX_NAME).write_text(text)
    found = message(folder)
    assert problem in found
    assert INDEX_NAME in found


HEADER_FAULTS = {
    "nested": ("[" * DEEP, "its header cannot be read (it is nested too deeply: line 1 column 101 (char 100))"),
    "nested in an entry": ('{"a": ' + "[" * DEEP + "]" * DEEP + "}", "it is nested too deeply: line 1 column 106"),
    "a long number": (
        '{"a": {"dtype": "F32", "shape": [1' + "0" * 5000 + "]}}",
        "its header cannot be read (a number of 5001 digits: line 1 column 34 (char 33))",
    ),
    "half a character in a name": (
        r'{"\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        r"is damaged: its header names a tensor '\ud800', which is not printable",
    ),
    "NUL in a name": (
        r'{"a\u0000": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        r"is damaged: its header names a tensor 'a\x00', which is not printable",
    ),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_a_header_that_no_program_writes(fault: str, tmp_path: Path) -> None:
    text, problem = HEADER_FAULTS[fault]
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with path.open("rb") as file, pytest.raises(HeaderError, match=re.escape(problem)):
        read_header(file)


def test_a_file_whose_name_is_no_text_is_named_all_the_same(own_tiny: Callable) -> None:
    folder = own_tiny().folder
    (folder / os.fsdecode(b"\xff.safetensors")).write_bytes(b"not weights")
    assert r"'\udcff.safetensors' is not a safetensors file" in message(folder)
    (folder / os.fsdecode(b"\xff.safetensors")).unlink()
    save_file({"model.norm.weight": torch.ones(64)}, folder / "other.safetensors")
    (folder / "other.safetensors").rename(folder / os.fsdecode(b"\xff.safetensors"))
    assert r"tensor model.norm.weight is in both model.safetensors and '\udcff.safetensors'" in message(folder)
