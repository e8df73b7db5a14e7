"""A damaged checkpoint stops every rank with one line that names file and tensor; stray files change nothing.

Field reports B08 (files absent, cut, pointers, wrong indexes and shapes), B09 (stray files) and B11 (quantised).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.model.checkpoint_files import INDEX_NAME
from paceline.model.communicator import Communicator, SingleRank, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.decoder import CausalLM
from paceline.model.errors import CheckpointError
from paceline.model.staging import StagingMemory
from paceline.model.weights import load_model

ROW = [1, 5, 9]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
GATE_PROJ = "model.layers.1.mlp.gate_proj.weight"


def load(folder: Path, comm: Communicator | None = None, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = ModelConfig.from_folder(folder)
    comm = comm or SingleRank()
    with StagingMemory(torch.device("cpu"), comm.size) as staging:
        return load_model(folder, config, comm, staging, dtype, max_model_len=64)


def fault(folder: Path) -> str:
    """The message that loading fails with, the same on each of two ranks."""

    def body(comm: Communicator) -> str:
        with pytest.raises(CheckpointError) as error:
            load(folder, comm)
        return str(error.value)

    first, second = run_simulated_ranks(2, body)
    assert first == second
    assert "\n" not in first
    return first


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def save(folder: Path, content: dict[str, torch.Tensor]) -> None:
    save_file(content, folder / "model.safetensors")


def split(folder: Path, parts: int = 3) -> list[Path]:
    """Replace the one file by several and an index, as large checkpoints are; the files' paths."""
    content = tensors(folder)
    names = sorted(content)
    paths = [folder / f"model-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)]
    weight_map = {name: paths[number % parts].name for number, name in enumerate(names)}
    for path in paths:
        save_file({name: content[name] for name in names if weight_map[name] == path.name}, path)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return paths


def edit_index(folder: Path, **changes: str) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"] |= changes
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_shards_with_an_index_give_the_same_model(own_tiny: Callable, logits_of: Callable) -> None:
    checkpoint = own_tiny()
    split(checkpoint.folder)
    (logits,) = logits_of(checkpoint.folder, 2, [ROW])
    torch.testing.assert_close(logits, checkpoint.reference_logits(ROW), atol=1e-4, rtol=0)


def test_several_files_without_an_index_give_the_same_model(own_tiny: Callable, logits_of: Callable) -> None:
    checkpoint = own_tiny()
    split(checkpoint.folder)
    (checkpoint.folder / INDEX_NAME).unlink()
    (logits,) = logits_of(checkpoint.folder, 2, [ROW])
    torch.testing.assert_close(logits, checkpoint.reference_logits(ROW), atol=1e-4, rtol=0)


def test_a_checkpoint_stored_fused_gives_the_same_model(own_tiny: Callable, logits_of: Callable) -> None:
    checkpoint = own_tiny(attention_bias=True)
    content = tensors(checkpoint.folder)
    for name in [name for name in content if ".q_proj." in name]:
        parts = [content.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        content[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    for name in [name for name in content if ".gate_proj." in name]:
        parts = [content.pop(name.replace("gate_proj", part)) for part in ("gate_proj", "up_proj")]
        content[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
    save(checkpoint.folder, content)
    for tp in (1, 3):
        (logits,) = logits_of(checkpoint.folder, tp, [ROW])
        torch.testing.assert_close(logits, checkpoint.reference_logits(ROW), atol=1e-4, rtol=0)


def test_files_that_the_index_does_not_name_are_not_read(
    own_tiny: Callable, logits_of: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """Field report B09."""
    checkpoint = own_tiny()
    split(checkpoint.folder, parts=2)
    stray = ["consolidated.safetensors", "model-00003-of-00003.safetensors", "adapter_model.safetensors"]
    save_file({Q_PROJ: torch.full((64, 64), 9.0)}, checkpoint.folder / stray[0])
    save_file({Q_PROJ: torch.full((64, 64), 9.0)}, checkpoint.folder / stray[1])
    (checkpoint.folder / stray[2]).write_bytes(b"not weights")
    with caplog.at_level(logging.INFO, "paceline"):
        (logits,) = logits_of(checkpoint.folder, 1, [ROW])
    torch.testing.assert_close(logits, checkpoint.reference_logits(ROW), atol=1e-4, rtol=0)
    (line,) = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
    assert all(name in line for name in stray)


def test_harmless_extras_are_passed_over_and_said(own_tiny: Callable, caplog: pytest.LogCaptureFixture) -> None:
    folder = own_tiny().folder
    extras = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in (0, 1)}
    save(folder, tensors(folder) | extras)
    with caplog.at_level(logging.INFO, "paceline"):
        load(folder)
    assert f"not needed and not read: {', '.join(extras)}" in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64])
def test_the_type_of_a_tensor_that_is_passed_over_does_not_matter(
    stored: torch.dtype, own_tiny: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    folder = own_tiny().folder
    content = {name: tensor.bfloat16() for name, tensor in tensors(folder).items()}
    save(folder, content | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8).to(stored)})
    with caplog.at_level(logging.INFO, "paceline"):
        load(folder, dtype=torch.bfloat16)
    assert not [record.getMessage() for record in caplog.records if "cast" in record.getMessage()]


def test_a_file_that_is_not_there(own_tiny: Callable) -> None:
    """Field report B08 (a)."""
    folder = own_tiny().folder
    paths = split(folder)
    paths[1].unlink()
    message = fault(folder)
    assert "model-00002-of-00003.safetensors cannot be opened: No such file or directory" in message
    assert "is missing" not in message


def test_a_file_cut_short(own_tiny: Callable) -> None:
    """Field report B08 (b)."""
    folder = own_tiny().folder
    paths = split(folder)
    os.truncate(paths[1], paths[1].stat().st_size - 1000)
    size = paths[1].stat().st_size
    wanted = (
        f"model-00002-of-00003.safetensors is cut short: it has {size} bytes, and its header speaks of {size + 1000}"
    )
    assert wanted in fault(folder)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_git_lfs_pointer(indexed: bool, own_tiny: Callable) -> None:
    """Field report B08 (c)."""
    folder = own_tiny().folder
    path = split(folder)[1] if indexed else folder / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1000\n")
    assert f"{path.name} is a Git LFS pointer" in fault(folder)


def test_an_index_that_puts_a_tensor_into_the_wrong_file(own_tiny: Callable) -> None:
    """Field report B08 (d)."""
    folder = own_tiny().folder
    split(folder)
    here = json.loads((folder / INDEX_NAME).read_text())["weight_map"][Q_PROJ]
    other = "model-00001-of-00003.safetensors"
    other = other if here != other else "model-00002-of-00003.safetensors"
    edit_index(folder, **{Q_PROJ: other})
    assert f"{INDEX_NAME} puts tensor {Q_PROJ} into {other}, which lacks it" in fault(folder)


def test_an_index_that_names_pickled_weights(own_tiny: Callable) -> None:
    folder = own_tiny().folder
    split(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    edit_index(folder, **{Q_PROJ: "pytorch_model.bin"})
    assert "names the file 'pytorch_model.bin', which is not a .safetensors file" in fault(folder)


def test_an_index_that_is_a_git_lfs_pointer(own_tiny: Callable) -> None:
    folder = own_tiny().folder
    (folder / INDEX_NAME).write_text("version https://git-lfs.github.com/spec/v1\n")
    assert f"{INDEX_NAME} is a Git LFS pointer" in fault(folder)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/weights.safetensors", "a/../../b.safetensors"])
def test_an_index_that_leaves_the_folder(name: str, own_tiny: Callable) -> None:
    folder = own_tiny().folder
    split(folder)
    edit_index(folder, **{Q_PROJ: name})
    assert f"names the file {name!r}, which is outside the folder" in fault(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as a safetensors index"),
        ("[]", "cannot be read as a safetensors index"),
        ("{}", "cannot be read as a safetensors index"),
        ('{"weight_map": {"a": 1}}', "weight_map must give a file name for each tensor"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "it gives a twice"),
    ],
)
def test_an_index_that_is_damaged(content: str, message: str, own_tiny: Callable) -> None:
    folder = own_tiny().folder
    (folder / INDEX_NAME).write_text(content)
    assert message in fault(folder)


def test_a_name_in_two_files_without_an_index(own_tiny: Callable) -> None:
    """Field report B09."""
    folder = own_tiny().folder
    save_file({Q_PROJ: torch.zeros(64, 64)}, folder / "other.safetensors")
    assert f"tensor {Q_PROJ} is in both model.safetensors and other.safetensors" in fault(folder)


def test_a_folder_without_safetensors(own_tiny: Callable) -> None:
    folder = own_tiny().folder
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has no *.safetensors files" in fault(folder)


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.pop(name)


def put(name: str, value: torch.Tensor) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update({name: value})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop(Q_PROJ), f"tensor {Q_PROJ} of shape [64, 64] is missing"),
        (drop("model.norm.weight"), "tensor model.norm.weight of shape [64] is missing"),
        (put(Q_PROJ, torch.zeros(72, 64)), f"{Q_PROJ} in model.safetensors has shape [72, 64], not [64, 64]"),
        (put(GATE_PROJ, torch.zeros(64, 128)), f"{GATE_PROJ} in model.safetensors has shape [64, 128], not [128, 64]"),
        (put("model.norm.weight", torch.zeros(1, 64)), "model.norm.weight in model.safetensors has shape [1, 64]"),
        (
            put(Q_PROJ, torch.zeros(64, 64, dtype=torch.float8_e4m3fn)),
            f"{Q_PROJ} in model.safetensors has type F8_E4M3",
        ),
        (put(Q_PROJ, torch.zeros(64, 64, dtype=torch.int32)), "has type I32; only BF16, F16, F32 are supported"),
        (put(Q_PROJ + "_scale_inv", torch.ones(1)), f"{Q_PROJ}_scale_inv in model.safetensors has no place in a Llama"),
        (
            put(Q_PROJ.replace("q_proj.weight", "q_proj.qweight"), torch.ones(1)),
            "q_proj.qweight in model.safetensors has no place in a LlamaForCausalLM (it belongs to a quantised",
        ),
        (put(Q_PROJ.replace("weight", "bias"), torch.ones(64)), "q_proj.bias in model.safetensors has no place"),
        (
            put(Q_PROJ.replace("q_proj", "qkv_proj"), torch.zeros(128, 64)),
            f"tensors {Q_PROJ} and {Q_PROJ.replace('q_proj', 'qkv_proj')} both fill",
        ),
    ],
)
def test_tensors_that_do_not_fit(damage: Callable, message: str, own_tiny: Callable) -> None:
    folder = own_tiny().folder
    content = tensors(folder)
    damage(content)
    save(folder, content)
    assert message in fault(folder)


def test_a_wrong_shape_in_one_of_several_files(own_tiny: Callable) -> None:
    """Field report B08 (e)."""
    folder = own_tiny().folder
    path = next(path for path in split(folder) if Q_PROJ in load_file(path))
    save_file(load_file(path) | {Q_PROJ: torch.zeros(72, 64)}, path)
    assert f"tensor {Q_PROJ} in {path.name} has shape [72, 64], not [64, 64]" in fault(folder)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.bfloat16])
def test_fp8_weights_without_a_word_in_config_json(stored: torch.dtype, own_tiny: Callable) -> None:
    """Field report B11: neither the raw values nor, where a tool has cast them, their dropped scales."""
    folder = own_tiny().folder
    scale = Q_PROJ + "_scale_inv"
    save(folder, tensors(folder) | {Q_PROJ: torch.zeros(64, 64, dtype=stored), scale: torch.ones(1, 1)})
    message = fault(folder)
    assert f"tensor {scale} in model.safetensors has no place in a LlamaForCausalLM (it belongs to a quant" in message
    refused = f"tensor {Q_PROJ} in model.safetensors has type F8_E4M3" in message
    assert refused == (stored == torch.float8_e4m3fn)


def test_gptq_weights_without_a_word_in_config_json(own_tiny: Callable) -> None:
    """Field report B11."""
    folder = own_tiny().folder
    content, name = tensors(folder), Q_PROJ.removesuffix("weight")
    del content[Q_PROJ]
    packed = {name + "qweight": (8, 64), name + "qzeros": (1, 8)}
    content |= {each: torch.zeros(shape, dtype=torch.int32) for each, shape in packed.items()}
    save(folder, content | {name + "scales": torch.ones(1, 64)})
    message = fault(folder)
    for ending in ("qweight", "qzeros", "scales"):
        assert f"{name}{ending} in model.safetensors has no place in a LlamaForCausalLM (it belongs to a qu" in message
    assert f"tensor {Q_PROJ} of shape [64, 64] is missing" in message


def test_all_faults_are_reported_together(own_tiny: Callable) -> None:
    folder = own_tiny(tie_word_embeddings=False).folder
    content = tensors(folder)
    del content["lm_head.weight"]
    content[Q_PROJ] = torch.zeros(8, 8)
    content["model.extra"] = torch.zeros(1)
    save(folder, content)
    message = fault(folder)
    for part in (
        "lm_head.weight of shape [256, 64] is missing",
        f"{Q_PROJ} in model.safetensors has shape [8, 8]",
        "model.extra",
    ):
        assert part in message
    save(folder, {"model.norm.weight": torch.ones(64)})
    assert "; and 10 more" in fault(folder)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_cast_and_it_is_said(
    stored: torch.dtype, wanted: torch.dtype, own_tiny: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    folder = own_tiny().folder
    content = {name: tensor.to(stored) for name, tensor in tensors(folder).items()}
    save(folder, content)
    with caplog.at_level(logging.INFO, "paceline"):
        model = load(folder, dtype=wanted)
    assert torch.equal(model.model.embed_tokens.weight, content["model.embed_tokens.weight"].to(wanted))
    assert all(parameter.dtype == wanted for parameter in model.parameters())
    cast = f"stored as {stored} are cast to {wanted}".replace("torch.", "")
    said = [record.levelno for record in caplog.records if cast in record.getMessage()]
    level = logging.WARNING if wanted == torch.float16 else logging.INFO
    assert said == ([] if stored == wanted else [level])


def test_values_beyond_float16_are_refused(own_tiny: Callable) -> None:
    folder = own_tiny().folder
    content = tensors(folder)
    content[Q_PROJ][3, 5] = 70000.0
    save(folder, content)
    with pytest.raises(
        CheckpointError, match=rf"{Q_PROJ} in model.safetensors holds 70000 at \[3, 5\], beyond float16"
    ):
        load(folder, dtype=torch.float16)
    load(folder, dtype=torch.bfloat16)
