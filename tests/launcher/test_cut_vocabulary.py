"""A vocabulary cut over real ranks gives what one rank gives: with a tied head, and where the ids do not divide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = """
    import json, sys
    from paceline import LLM, SamplingParams
    from paceline.coordinator.errors import InputError

    model, vocab_size, prompt, rules = json.loads(sys.argv[1])
    llm = LLM(model, device="cpu", dtype="float32", check_lockstep=True, num_blocks=999)
    for choice in llm.generate(prompt, SamplingParams(**rules, ignore_eos=True))[0].outputs:
        scores = [(each.chosen, list(each.top_ids), list(each.top)) for each in choice.logprobs]
        print(json.dumps([choice.token_ids, scores]))
    try:
        llm.generate([vocab_size], SamplingParams())
    except InputError as error:
        print(json.dumps(str(error)))
"""

Choice = tuple[list[int], list[Any]]


@pytest.fixture
def answers(tmp_path: Path) -> Callable[..., tuple[list[Choice], str]]:
    """answers(tp, checkpoint, prompt, **rules): the choices, and what is said of the first id beyond the vocabulary."""

    def run(tp: int, checkpoint: Any, prompt: list[int], **rules: Any) -> tuple[list[Choice], str]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(SCRIPT))
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)] if tp > 1 else []
        job = [str(checkpoint.folder), checkpoint.reference.config.vocab_size, prompt, rules]
        command = [sys.executable, *ranks, str(script), json.dumps(job)]
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
        assert result.returncode == 0, result.stderr
        *choices, refusal = map(json.loads, result.stdout.splitlines())
        return choices, refusal

    return run


def check_scores(checkpoint: Any, prompt: list[int], choice: Choice, top: int) -> None:
    """Log-probabilities of the chosen and of the likeliest ids are transformers'."""
    token_ids, scores = choice
    reference = torch.log_softmax(checkpoint.reference_logits(prompt + token_ids[:-1]), -1)[len(prompt) - 1 :]
    for token_id, (chosen, top_ids, tops), row in zip(token_ids, scores, reference, strict=True):
        assert abs(chosen - row[token_id].item()) < 1e-4
        best = row.topk(top)
        assert top_ids == best.indices.tolist()
        torch.testing.assert_close(torch.tensor(tops), best.values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tied_head_that_is_not_in_the_file(
    tp: int, tiny: Callable[..., Any], answers: Callable[..., tuple[list[Choice], str]]
) -> None:
    """Field report B01: 32 greedy tokens."""
    checkpoint, prompt = tiny("llama"), [1, 5, 9]
    assert "lm_head.weight" not in load_file(checkpoint.folder / "model.safetensors")
    (choice,), _ = answers(tp, checkpoint, prompt, temperature=0, max_tokens=32, logprobs=3)
    check_scores(checkpoint, prompt, choice, 3)
    assert choice[0] == [top_ids[0] for _, top_ids, _ in choice[1]]
    assert len(choice[0]) == 32


def test_ids_that_do_not_divide(tiny: Callable[..., Any], answers: Callable[..., tuple[list[Choice], str]]) -> None:
    """Field report B07: what is padded is never chosen, never among the likeliest, and never part of the vocabulary."""
    checkpoint, prompt = tiny("llama", vocab_size=259), [258, 257, 1]
    rules = {"n": 100, "temperature": 5.0, "seed": 0, "max_tokens": 2, "logprobs": 5}
    alone, refusal = answers(1, checkpoint, prompt, **rules)
    assert refusal.endswith("token ids are whole numbers from 0 to 258")
    assert len({tuple(token_ids) for token_ids, _ in alone}) > 90
    for choice in alone:
        check_scores(checkpoint, prompt, choice, 5)
    for tp in (2, 4):
        choices, said = answers(tp, checkpoint, prompt, **rules)
        assert said == refusal
        assert [token_ids for token_ids, _ in choices] == [token_ids for token_ids, _ in alone]
        for choice in choices:
            assert max(choice[0]) < 259
            check_scores(checkpoint, prompt, choice, 5)
