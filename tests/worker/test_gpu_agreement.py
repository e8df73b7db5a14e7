"""The engine on a GPU in bfloat16 against float32 on real shapes: its CPU path, and transformers on the same GPU."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import models
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.model.communicator import SingleRank
from paceline.model.config import ModelConfig
from paceline.model.context import StepContext
from paceline.model.staging import StagingMemory
from paceline.model.weights import load_model

MARGIN = 0.15
"""Most that a logit moves between bfloat16 and float32 here; logits have a standard deviation of about 1."""


def float32_logits(folder: Path, token_ids: Sequence[int], first: int) -> torch.Tensor:
    """Logits [T - first, vocab] of the CPU path in float32 with the bfloat16 weights, from position first on."""
    config = ModelConfig.from_folder(folder)
    with StagingMemory(torch.device("cpu"), 1) as staging:
        model = load_model(
            folder, config, SingleRank(), staging, torch.bfloat16, load_format="dummy", max_model_len=1024
        ).float()
    length = len(token_ids)
    blocks = -(-length // 16)
    shape = (blocks, 16, config.num_key_value_heads, config.head_dim)
    context = StepContext(
        positions=torch.arange(length, dtype=torch.int32),
        slot_mapping=torch.arange(length),
        query_start=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        row_slots=torch.tensor([0], dtype=torch.int32),
        logits_tokens=torch.arange(first, length),
        kv_caches=[(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_hidden_layers)],
    )
    with torch.inference_mode():
        return model.logits(*model(torch.tensor(token_ids), context))


GENERATE = """
import json, sys
from paceline import LLM, SamplingParams

folder, load_format, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(folder, device="cuda", load_format=load_format, max_model_len=1024, max_batched_tokens=256, num_blocks=512)
def answers(**rules):
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, **rules)
    return [output.outputs[0] for output in llm.generate(prompts, params)]
# Without rules a step is one CUDA graph; a bias makes the ranks of one vocabulary shard adjust logits.
plain, biased, reported = answers(), answers(logit_bias={3: -1.0}), answers(logprobs=0)
logprobs = [[entry.chosen for entry in answer.logprobs] for answer in reported]
print(json.dumps([[answer.token_ids for answer in each] for each in (plain, biased, reported)] + [logprobs]))
"""


PROMPTS = [[random.Random(length).randrange(10, 100000) for _ in range(length)] for length in (5, 64, 300, 17)]
BOTH_MODELS = pytest.mark.parametrize("model", ["qwen3-0.6b", "llama3.2-1b"])


def generate(folder: Path, load_format: str, size: int) -> tuple[list[list[list[int]]], list[list[float]]]:
    """Three engine runs' answers to PROMPTS, and the log-probabilities that the last of them gives for its tokens."""
    script = folder / "generate.py"
    script.write_text(GENERATE)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    arguments = [str(folder), load_format, json.dumps(PROMPTS)]
    result = subprocess.run([sys.executable, "-m", *torchrun, str(script), *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *runs, logprobs = json.loads(result.stdout)
    return runs, logprobs


def assert_taken(answer: Sequence[int], logits: torch.Tensor) -> None:
    """Every token is the argmax of the logits before it, or within the margin of bfloat16 of it, and seldom that."""
    taken = torch.tensor(answer, device=logits.device)[:, None]
    shortfall = logits.amax(1) - logits.gather(1, taken)[:, 0]
    assert shortfall.max() <= MARGIN, f"token {int(shortfall.argmax())} is {shortfall.max():.3f} below the best"
    assert (shortfall == 0).float().mean() >= 0.8


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu2)])
@BOTH_MODELS
def test_greedy_decoding_agrees_with_the_cpu(model: str, size: int, tmp_path: Path) -> None:
    models.write_folder(model, tmp_path)
    runs, logprobs = generate(tmp_path, "dummy", size)
    for answers in runs:
        reported = answers is runs[-1]
        for prompt, answer, chosen in zip(PROMPTS, answers, logprobs, strict=True):
            logits = float32_logits(tmp_path, [*prompt, *answer[:-1]], len(prompt) - 1)
            assert_taken(answer, logits)
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert not reported or (torch.tensor(chosen) - expected).abs().max() < MARGIN


@pytest.mark.gpu
@BOTH_MODELS
def test_greedy_decoding_of_a_checkpoint_agrees_with_transformers(model: str, tmp_path: Path) -> None:
    models.write_folder(model, tmp_path)
    torch.manual_seed(0)
    with torch.device("cuda"):
        reference = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16, attn_implementation="eager"
        )
    reference.save_pretrained(tmp_path)
    runs, _ = generate(tmp_path, "safetensors", 1)
    reference.float()
    for answers in runs:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *answer[:-1]]], device="cuda")
                assert_taken(answer, reference(ids).logits[0, len(prompt) - 1 :])
