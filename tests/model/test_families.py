"""Logits equal those of transformers at every number of ranks, whole prompts or in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.model.communicator import Communicator, SingleRank, run_simulated_ranks
from paceline.model.config import FAMILIES, ModelConfig
from paceline.model.context import StepContext
from paceline.model.registry import MODEL_CLASSES
from paceline.model.shard_plan import ShardPlan
from paceline.model.staging import StagingMemory
from paceline.model.weights import load_model

ROWS = [
    [1, 5, 9, 200, 17, 3, 3, 3, 250, 101, 77, 8, 90, 55, 31, 6, 129, 40, 2, 11, 64],
    [255, 0, 12, 99, 18, 7, 54, 180, 33],
]
WHOLE = [[(0, 21), (1, 9)]]
MIXED = [[(0, 7)], [(1, 8)], [(1, 1), (0, 7)], [(0, 6)], [(0, 1)]]
"""Chunked prompts, a decode beside a chunk, and a decode alone."""


def assert_equals_transformers(checkpoint: Any, logits: list[torch.Tensor], rows: list[list[int]]) -> None:
    for row, found in zip(rows, logits, strict=True):
        torch.testing.assert_close(found, checkpoint.reference_logits(row), atol=1e-4, rtol=0)


@pytest.mark.parametrize("steps", [WHOLE, MIXED], ids=["whole", "mixed"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_transformers(family: str, tp: int, steps: Any, tiny: Callable, logits_of: Callable) -> None:
    checkpoint = tiny(family)
    assert_equals_transformers(checkpoint, logits_of(checkpoint.folder, tp, ROWS, steps), ROWS)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": False, "head_dim": 24}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"attention_bias": True}),
    ],
    ids=["llama-biases", "llama-untied", "qwen2-untied", "qwen3-biases"],
)
def test_biases_are_added_once_and_untied_heads_are_their_own(
    family: str, changes: dict[str, Any], tp: int, tiny: Callable, logits_of: Callable
) -> None:
    """Field report B12; qwen2, whose biases are as large, is compared above."""
    checkpoint = tiny(family, **changes)
    assert_equals_transformers(checkpoint, logits_of(checkpoint.folder, tp, ROWS, MIXED), ROWS)


@pytest.mark.parametrize(
    ("family", "tp", "changes"),
    [
        ("llama", 4, {}),
        ("qwen2", 4, {}),
        ("llama", 4, {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16}),
        ("llama", 8, {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16}),
        ("qwen2", 7, {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2}),
    ],
    ids=["copied", "copied-biases", "3-heads-4-ranks", "3-heads-8-ranks", "2-heads-7-ranks"],
)
def test_fewer_kv_heads_than_ranks(
    family: str, tp: int, changes: dict[str, Any], tiny: Callable, logits_of: Callable
) -> None:
    """Field report B05: heads are copied, or padded where neither number divides the other; each rank has one."""
    checkpoint = tiny(family, **changes)
    assert_equals_transformers(checkpoint, logits_of(checkpoint.folder, tp, ROWS, MIXED), ROWS)
    plan = ShardPlan(ModelConfig.from_folder(checkpoint.folder), tp)
    assert {plan.kv_heads(rank).padded for rank in range(tp)} == {1}


def test_a_copied_kv_head_has_the_same_keys_on_its_ranks(tiny: Callable, paged_rows: Any) -> None:
    """Field report B05: its biases are copied with its weights."""
    config = ModelConfig.from_folder(tiny("qwen2").folder)

    def cache_of_first_layer(comm: Communicator) -> torch.Tensor:
        with StagingMemory(torch.device("cpu"), comm.size) as staging:
            model = load_model(tiny("qwen2").folder, config, comm, staging, torch.float32, max_model_len=64)
        paged = paged_rows(model, comm, ROWS)
        paged.step(WHOLE[0])
        return torch.stack(paged.kv_caches[0]).nan_to_num()

    caches = run_simulated_ranks(4, cache_of_first_layer)
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[2], caches[3])
    assert not torch.equal(caches[1], caches[2])


@pytest.mark.parametrize("tp", [2, 4])
def test_a_vocabulary_that_does_not_divide(tp: int, tiny: Callable, logits_of: Callable) -> None:
    """Field report B07; test_cut_vocabulary.py has what is sampled."""
    checkpoint = tiny("llama", vocab_size=259)
    rows = [[258, 257, 1], [0, 130, 258, 129]]
    assert_equals_transformers(checkpoint, logits_of(checkpoint.folder, tp, rows), rows)


def test_only_the_rows_asked_for_get_logits(tiny: Callable) -> None:
    folder = tiny("llama").folder
    config = ModelConfig.from_folder(folder)
    with StagingMemory(torch.device("cpu"), 1) as staging:
        model = load_model(folder, config, SingleRank(), staging, torch.float32, max_model_len=64)

    def logits(tokens: torch.Tensor | None) -> torch.Tensor:
        shape = (2, 4, config.num_key_value_heads, config.head_dim)
        context = StepContext(
            positions=torch.arange(5, dtype=torch.int32),
            slot_mapping=torch.arange(5),
            query_start=torch.tensor([0, 5], dtype=torch.int32),
            seq_lens=torch.tensor([5], dtype=torch.int32),
            block_tables=torch.tensor([[0, 1]], dtype=torch.int32),
            row_slots=torch.tensor([0], dtype=torch.int32),
            logits_tokens=tokens,
            kv_caches=[(torch.empty(shape), torch.empty(shape)) for _ in range(config.num_hidden_layers)],
        )
        with torch.inference_mode():
            return model.logits(*model(torch.arange(5), context))

    torch.testing.assert_close(logits(torch.tensor([4, 1])), logits(None)[[4, 1]])


def test_every_architecture_of_the_config_has_a_class() -> None:
    assert FAMILIES.keys() == MODEL_CLASSES.keys()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_layers_after_the_second_are_of_its_kind(family: str, tiny: Callable) -> None:
    """Kernels are compiled for the first two layers alone."""
    config = ModelConfig.from_folder(tiny(family, num_hidden_layers=4).folder)
    model = MODEL_CLASSES[config.architecture](config, SingleRank(), torch.bfloat16, 64)

    def kind(layer: torch.nn.Module) -> list[Any]:
        """Types, settings and shapes; neither the layer's number nor values."""
        settings = [
            (type(module), name, value)
            for module in layer.modules()
            for name, value in vars(module).items()
            if isinstance(value, (int, float, str)) and name != "_layer_index"
        ]
        return settings + [(name, value.shape, value.dtype) for name, value in layer.named_parameters()]

    whole = list(model.model.layers)
    assert kind(whole[1]) == kind(whole[2]) == kind(whole[3])
    with model.two_layers():
        assert list(model.model.layers) == whole[:2]
    assert list(model.model.layers) == whole
