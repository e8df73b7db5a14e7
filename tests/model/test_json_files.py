"""Every JSON file of a checkpoint that is ours to read: what is none that can be read is named, in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_configs import LLAMA

from paceline.model.config import ModelConfig
from paceline.model.errors import ModelConfigError
from paceline.model.json_fields import MOST_NESTING, read_json_object
from paceline.model.quantization import QUANTIZATION_FILES

FILES = ("config.json", "generation_config.json", *QUANTIZATION_FILES)


def write(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "lists without end": (write(b"[" * 200_000), f"are nested more than {MOST_NESTING} deep"),
    "objects without end": (write(b'{"a":' * 200_000), f"are nested more than {MOST_NESTING} deep"),
    "too deep": (write(b'{"a":' * 101 + b"1" + b"}" * 101), f"are nested more than {MOST_NESTING} deep"),
    "deep in a field": (
        write(b'{"vocab_size": ' + b"[" * 900 + b"]" * 900 + b"}"),
        f"are nested more than {MOST_NESTING} deep",
    ),
    "Git LFS": (write(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "is a Git LFS pointer; fetch"),
    "latin-1": (write(b'{"a": "\xff"}'), "cannot be read: it is no UTF-8 at byte 7"),
    "cut short": (write(b'{"a": '), "cannot be read as JSON: Expecting value: line 1 column 7 (char 6)"),
    "empty": (write(b""), "cannot be read as JSON: Expecting value: line 1 column 1 (char 0)"),
    "a list": (write(b"[1]"), "must hold a JSON object, not [1]"),
    "a long number": (write(b"1" * 5000), "must hold a JSON object, not 11111111111111111111… (5,000 digits)"),
    "a folder": (Path.mkdir, "cannot be read: it is not a regular file"),
    "a pipe": (os.mkfifo, "cannot be read: it is not a regular file"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_read_is_named(name: str, damage: str, tmp_path: Path) -> None:
    if name != "config.json":
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    do_damage, message = DAMAGES[damage]
    do_damage(tmp_path / name)
    with pytest.raises(ModelConfigError) as error:
        ModelConfig.from_folder(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / name} ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ['{"a":' * 100 + "1" + "}" * 100, '{"a":' + "[" * 99 + "]" * 99 + "}"])
def test_as_deep_as_is_read(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    assert json.dumps(read_json_object(tmp_path / "a.json"), separators=(",", ":")) == content
