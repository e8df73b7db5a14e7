"""Reading a tokenizer: it is the one that transformers picks, without what transformers would import to pick it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from paceline.coordinator.errors import InputError
from paceline.launcher.bench.target import _local_encoder
from paceline.launcher.tokenizer import Tokenizer


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("named", [None, "PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizerFast"])
def test_it_is_the_one_that_transformers_picks(
    named: str | None, model_type: str, default_model: Path, tmp_path: Path
) -> None:
    shutil.copy(default_model / "tokenizer.json", tmp_path)
    for name, changes in (("tokenizer_config.json", {"tokenizer_class": named}), ("config.json", {})):
        fields = json.loads((default_model / name).read_text()) | changes
        fields |= {"model_type": model_type} if name == "config.json" else {}
        (tmp_path / name).write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    expected = AutoTokenizer.from_pretrained(tmp_path, clean_up_tokenization_spaces=False)
    backend = Tokenizer(tmp_path).backend
    assert type(backend) is type(expected)
    assert backend.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert backend.special_tokens_map == expected.special_tokens_map
    assert backend.chat_template == expected.chat_template


def test_reading_it_imports_no_compiler(default_model: Path) -> None:
    """It would take most of the time until an engine looks at its weights."""
    script = """
import sys
from pathlib import Path
from paceline.coordinator.errors import InputError
from paceline.launcher.tokenizer import Tokenizer
Tokenizer(Path(sys.argv[1]))
sys.exit(not {"torch._dynamo", "sympy"}.isdisjoint(sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", script, str(default_model)], check=False).returncode == 0


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "cannot be read: its lists and objects are nested more than 100 deep"),
        (b'{"chat_template": "\xff"}', "cannot be read: it is no UTF-8 at byte 19"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "is a Git LFS pointer; fetch the file itself with git lfs pull",
        ),
        (b"[]", "must hold a JSON object, not []"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    name: str, content: bytes, message: str, default_model: Path, tmp_path: Path
) -> None:
    for each in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(default_model / each, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        Tokenizer(tmp_path)
    assert str(error.value) == f"{tmp_path / name} {message}"


@pytest.mark.parametrize("read", [Tokenizer, _local_encoder])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_code_in_a_folder_is_never_run(
    name: str,
    read: Callable[[Path], object],
    default_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even if whoever sits at the terminal would say yes."""
    monkeypatch.setattr("builtins.input", lambda _: "y")
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    (tmp_path / "code.py").write_text("import os, pathlib\npathlib.Path(os.environ['RAN']).touch()\n")
    shutil.copy(default_model / "tokenizer.json", tmp_path)
    own = {"AutoTokenizer": ["code.Own", "code.Own"]} if name == "tokenizer_config.json" else {"AutoConfig": "code.Own"}
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    (tmp_path / name).write_text(json.dumps({"model_type": "unheard of", "auto_map": own}))
    # A config of its own is passed over, a tokenizer of its own cannot be.
    with pytest.raises(InputError) if name == "tokenizer_config.json" else nullcontext():
        read(tmp_path)
    assert not (tmp_path / "ran").exists()
