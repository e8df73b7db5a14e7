"""Log-probabilities of a prompt's own tokens equal transformers', in whatever pieces the prompt is computed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.launcher.outputs import RequestOutput

PROMPTS = [
    [(7 * place * place + index) % 256 for place in range(length)] for index, length in enumerate((1, 2, 50, 300))
]

SCRIPT = """
    import dataclasses, json, sys
    from paceline import LLM, SamplingParams

    model, prompts = json.loads(sys.argv[1])
    llm = LLM(model, device="cpu", dtype="float32", max_batched_tokens=70, check_lockstep=True)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3)
    for output in llm.generate(prompts, params):
        print(json.dumps([None if each is None else dataclasses.astuple(each) for each in output.prompt_logprobs]))
"""


def check(scores: Sequence[Any], prompt: list[int], checkpoint: Any, top: int) -> None:
    """scores: (chosen, top ids, top, rank) of each token."""
    reference = torch.log_softmax(checkpoint.reference_logits(prompt), -1)
    assert len(scores) == len(prompt)
    assert scores[0] is None
    for place, (chosen, top_ids, tops, rank) in enumerate(scores[1:], 1):
        row = reference[place - 1]
        assert abs(chosen - row[prompt[place]].item()) < 1e-4
        assert rank == int((row > row[prompt[place]]).sum()) + 1
        best = row.topk(top)
        assert list(top_ids) == best.indices.tolist()
        torch.testing.assert_close(torch.tensor(tops), best.values, atol=1e-4, rtol=0)


def tuples(output: RequestOutput) -> list[Any]:
    assert output.prompt_logprobs is not None
    return [each and (each.chosen, each.top_ids, each.top, each.rank) for each in output.prompt_logprobs]


@pytest.mark.parametrize(("family", "max_batched_tokens"), [("llama", 2048), ("qwen3", 64), ("llama", 9)])
def test_scores_equal_transformers(tiny: Callable[..., Any], family: str, max_batched_tokens: int) -> None:
    """In one piece of more positions than are scored at once, and in chunks; beside rows that are not scored."""
    checkpoint = tiny(family)
    rules = {"temperature": 0, "max_tokens": 3}
    with LLM(checkpoint.folder, device="cpu", max_batched_tokens=max_batched_tokens, num_blocks=99) as llm:
        plain = llm.generate(PROMPTS[1:], SamplingParams(**rules), use_tqdm=False)
        params = [SamplingParams(**rules, prompt_logprobs=index) for index in range(4)]
        scored = llm.generate(PROMPTS + PROMPTS[1:], [*params, *[SamplingParams(**rules)] * 3], use_tqdm=False)
        alone = llm.generate(PROMPTS, SamplingParams(max_tokens=0, prompt_logprobs=2, n=2), use_tqdm=False)
        single = llm.generate(PROMPTS[1], SamplingParams(max_tokens=0, prompt_logprobs=2), use_tqdm=False)
    check(tuples(single[0]), PROMPTS[1], checkpoint, 2)
    for prompt, output, top in zip(PROMPTS, scored, range(4), strict=False):
        check(tuples(output), prompt, checkpoint, top)
        assert output.cached_tokens == 0
    for prompt, output in zip(PROMPTS, alone, strict=True):
        check(tuples(output), prompt, checkpoint, 2)
        assert [(choice.token_ids, choice.finish_reason) for choice in output.outputs] == [([], "length")] * 2
    answers = [output.outputs[0].token_ids for output in plain]
    assert [output.outputs[0].token_ids for output in scored[1:4]] == answers
    assert [output.outputs[0].token_ids for output in scored[4:]] == answers
    assert all(output.prompt_logprobs is None for output in scored[4:])


def test_two_ranks_score_alike(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """259 ids do not divide: the last rank has padding, which must not count."""
    checkpoint = tiny("qwen2", vocab_size=259)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(
        [*command, json.dumps([str(checkpoint.folder), PROMPTS])],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    for prompt, line in zip(PROMPTS, result.stdout.splitlines(), strict=True):
        check(json.loads(line), prompt, checkpoint, 3)
