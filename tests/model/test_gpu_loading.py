"""Loading to a GPU, through pinned buffers and streams of their own, gives what loading to the CPU gives."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.model import finite_values, shard_reader, tied_head, weights
from paceline.model.communicator import Communicator, SingleRank, run_simulated_ranks
from paceline.model.config import ModelConfig
from paceline.model.errors import CheckpointError
from paceline.model.pinned_copies import pinned_copies_on
from paceline.model.registry import MODEL_CLASSES
from paceline.model.staging import StagingMemory
from paceline.model.weights import load_model

pytestmark = pytest.mark.gpu

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("piece_bytes", [1 << 10, 8 << 20])
def test_the_same_bits_as_on_the_cpu(
    tp: int, dtype: torch.dtype, piece_bytes: int, tiny: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small pieces every buffer is used again and again while copies are under way."""
    monkeypatch.setattr(shard_reader, "PIECE_BYTES", piece_bytes)
    folder = tiny("qwen2", vocab_size=259).folder
    config = ModelConfig.from_folder(folder)

    def on(device: str) -> list[dict[str, torch.Tensor]]:
        def body(comm: Communicator) -> dict[str, torch.Tensor]:
            with StagingMemory(torch.device(device), tp) as staging:
                model = load_model(folder, config, comm, staging, dtype, max_model_len=64)
            return {name: parameter.data.cpu() for name, parameter in model.named_parameters()}

        return run_simulated_ranks(tp, body)

    for ours, expected in zip(on("cuda"), on("cpu"), strict=True):
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], expected[name]) for name in ours)


def test_copies_come_after_the_zeros_that_a_busy_stream_has_yet_to_write(tiny: Callable) -> None:
    folder = tiny("qwen2").folder
    config = ModelConfig.from_folder(folder)
    with StagingMemory(torch.device("cpu"), 1) as staging:
        expected = load_model(folder, config, SingleRank(), staging, torch.bfloat16, max_model_len=64)
    with torch.cuda.stream(torch.cuda.Stream()), StagingMemory(torch.device("cuda"), 1) as staging:
        torch.cuda._sleep(500_000_000)  # cycles: a quarter of a second
        model = load_model(folder, config, SingleRank(), staging, torch.bfloat16, max_model_len=64)
    torch.cuda.synchronize()
    for (name, parameter), (_, reference) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(parameter.data.cpu(), reference.data), name


def test_the_driver_is_asked_for_large_parameters_once(tiny: Callable) -> None:
    config = ModelConfig.from_folder(tiny("qwen2", vocab_size=1 << 17, tie_word_embeddings=False).folder)
    model = MODEL_CLASSES[config.architecture](config, SingleRank(), torch.bfloat16, 64)

    def segments() -> int:
        number: int = torch.cuda.memory_stats()["segment.large_pool.allocated"]
        return number

    torch.cuda.empty_cache()
    before = segments()
    weights._materialise(model, torch.device("cuda"))
    assert sum(parameter.nbytes > 10 << 20 for parameter in model.parameters()) == 2
    assert segments() - before == 1


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (float("nan"), torch.bfloat16, "holds nan at [40, 3]"),
        (float("-inf"), torch.float32, "holds -inf at [40, 3]"),
        (70000.0, torch.float16, "holds 70000 at [40, 3], beyond float16"),
    ],
)
def test_values_that_are_not_finite_are_found_on_the_gpu(
    value: float, dtype: torch.dtype, message: str, own_tiny: Callable
) -> None:
    folder = own_tiny().folder
    content = load_file(folder / "model.safetensors")
    content[Q_PROJ][40, 3] = value
    save_file(content, folder / "model.safetensors")
    config = ModelConfig.from_folder(folder)
    wanted = re.escape(f"tensor {Q_PROJ} in model.safetensors {message}")
    with StagingMemory(torch.device("cuda"), 1) as staging, pytest.raises(CheckpointError, match=wanted):
        load_model(folder, config, SingleRank(), staging, dtype, max_model_len=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_is_compared_on_the_gpu(
    dtype: torch.dtype, own_tiny: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tied_head, "PIECE_BYTES", 1 << 10)  # four rows
    folder = own_tiny().folder
    config = ModelConfig.from_folder(folder)
    content = load_file(folder / "model.safetensors")
    head = content["model.embed_tokens.weight"].clone()
    save_file(content | {"lm_head.weight": head}, folder / "model.safetensors")
    with torch.cuda.stream(torch.cuda.Stream()), StagingMemory(torch.device("cuda"), 1) as staging:
        load_model(folder, config, SingleRank(), staging, dtype, max_model_len=64)
    head[130, 3] = head[131, 4] = 9.0
    save_file(content | {"lm_head.weight": head}, folder / "model.safetensors")
    expected = content["model.embed_tokens.weight"][130, 3].to(dtype).item()
    wanted = re.escape(f"first in the rows of rank 0 at [130, 3]: 9.0 and not {expected!r}")
    with StagingMemory(torch.device("cuda"), 1) as staging, pytest.raises(CheckpointError, match=wanted):
        load_model(folder, config, SingleRank(), staging, dtype, max_model_len=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_looks_at_values_is_loaded_before(dtype: torch.dtype) -> None:
    """Kernels that get_ready does not run are loaded by the first look, while everybody waits for it."""

    def kernels(run: Callable[[], object]) -> set[str]:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            run()
            torch.cuda.synchronize()
        return {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}

    sizes = [128, 4096, 5 << 20, 130 << 20, *range(1, 400)]  # in elements; of one chunk and of many, in many launches
    tensors = [torch.zeros(size, dtype=dtype, device="cuda") for size in sizes]
    ready = kernels(lambda: finite_values.get_ready(torch.device("cuda"), dtype))
    look = kernels(lambda: finite_values._are_finite(tensors))
    assert look
    assert look <= ready


def test_copies_begin_through_the_runtime_that_torch_was_linked_with() -> None:
    stream = torch.cuda.Stream()
    copies = pinned_copies_on(stream)
    assert copies is not None
    source = torch.arange(1 << 20, dtype=torch.int32, pin_memory=True)
    destination = torch.zeros_like(source, device="cuda")
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    done.record(stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # cycles: a quarter of a second
    copies.start(destination.data_ptr() + 4, source.data_ptr(), source.nbytes - 4, done.cuda_event)
    assert not done.query()
    done.synchronize()
    assert torch.equal(destination[1:].cpu(), source[:-1])
