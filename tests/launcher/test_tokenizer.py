"""Reading a tokenizer: it is the one that transformers picks, without what transformers would import to pick it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

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
from paceline.launcher.tokenizer import Tokenizer
Tokenizer(Path(sys.argv[1]))
sys.exit(not {"torch._dynamo", "sympy"}.isdisjoint(sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", script, str(default_model)], check=False).returncode == 0
