"""Set-up of the whole test run: Triton's interpreter where there is no GPU, GPU tests skipped there; tiny checkpoints.

torch and transformers are imported only by the tests that need them: the coordinator's do not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

# What tests share lies in folders of modules, not in packages; they join the path, last.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).with_name("support")))
from tiny_configs import SIZES

if TYPE_CHECKING:
    import torch

_GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
if _GPUS == 0:
    # Triton reads this when a kernel is decorated, so it must be set before any test imports one.
    os.environ["TRITON_INTERPRET"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script's background jobs ignore Ctrl-C, and so would the programs that tests start and send it to.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, however slow the machine.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than there are."""
    for item in items:
        for marker, needed in (("gpu", 1), ("gpu2", 2)):
            if marker in item.keywords and needed > _GPUS:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPUs, found {_GPUS}"))


TINY = SIZES | {"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
"""The shape of field report cases; qwen3 has heads wider than hidden_size / heads."""


class TinyCheckpoint:
    """A folder, and the transformers model that wrote it."""

    def __init__(self, folder: Path, family: str, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
        config = getattr(transformers, f"{name}Config")(**settings)
        torch.manual_seed(len(family) + settings["hidden_size"])
        self.folder = folder
        self.reference: Any = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        """The transformers model that wrote the folder."""
        for parameter_name, parameter in self.reference.named_parameters():
            scale = 1.0 if parameter_name.endswith("bias") else 0.2  # B12: biases as large as N(0, 1)
            parameter.data.normal_(1.0 if parameter_name.endswith("norm.weight") else 0.0, scale)
        self.reference.save_pretrained(folder)

    def reference_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, vocab_size] of transformers in float32."""
        import torch

        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([token_ids])).logits[0]
            return logits


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyCheckpoint]:
    """tiny(family, **settings): the checkpoint of these settings, made once; not to be changed by tests."""
    made: dict[str, TinyCheckpoint] = {}

    def make(family: str, **changes: Any) -> TinyCheckpoint:
        settings = TINY | ({"head_dim": 32} if family == "qwen3" else {}) | changes
        key = family + json.dumps(settings, sort_keys=True)
        if key not in made:
            made[key] = TinyCheckpoint(tmp_path_factory.mktemp(family), family, settings)
        return made[key]

    return make


@pytest.fixture
def own_tiny(tmp_path: Path) -> Callable[..., TinyCheckpoint]:
    """The same, made for one test, which may damage its files."""

    def make(family: str = "llama", **changes: Any) -> TinyCheckpoint:
        return TinyCheckpoint(tmp_path, family, TINY | changes)

    return make
