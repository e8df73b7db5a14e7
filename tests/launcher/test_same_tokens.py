"""Greedy and seeded tokens do not depend on what a request happens to run with: the batch, the chunk size, the block
size, the state of the prefix cache, or preemption. Everything is float32; the tiny models come from transformers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams

NEW_TOKENS = 16
NUM_PROMPTS = 64
FAMILIES = ("llama", "qwen2", "qwen3")

PROMPTS_FIRST_BATCH: dict[str, Any] = {"block_size": 16, "max_num_seqs": 256, "max_batched_tokens": 2048}
VARIATIONS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "three at a time": {"max_num_seqs": 3},
    "chunks of seven tokens": {"max_batched_tokens": 7, "max_num_seqs": 4},
    "decodes first": {"max_batched_tokens": 40, "policy": "decodes-first"},
    "blocks of one token": {"block_size": 1, "num_blocks": 2000},
    "blocks of 32 tokens": {"block_size": 32},
    "no prefix cache": {"prefix_cache": False},
    "few blocks": {"block_size": 4, "num_blocks": 48},
}


def make_prompts() -> list[list[int]]:
    """Random prompts of 1 to 60 tokens, of which every third begins like another one."""
    rng = random.Random(4)
    prompts: list[list[int]] = []
    for index in range(NUM_PROMPTS):
        own = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        if index % 3 == 2:
            shared = prompts[rng.randrange(index)]
            own = shared[:48] + own[: 60 - min(len(shared), 48)]
        prompts.append(own)
    return prompts


def greedy_ids(llm: LLM, prompts: Sequence[Sequence[int]], **rules: Any) -> list[list[int]]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **rules})
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params)]


def transformers_ids(reference: Any, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([list(prompt)])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(out[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def reference_ids(tiny: Callable[..., Any]) -> Callable[[str], list[list[int]]]:
    """What transformers answers to the prompts, by family; worked out once."""
    return functools.cache(
        lambda family: [transformers_ids(tiny(family).reference, prompt) for prompt in make_prompts()]
    )


@pytest.mark.parametrize("name", VARIATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers_in_every_setting(
    family: str, name: str, tiny: Callable[..., Any], reference_ids: Callable[[str], list[list[int]]]
) -> None:
    prompts, expected = make_prompts(), reference_ids(family)
    with LLM(str(tiny(family).folder), device="cpu", **(PROMPTS_FIRST_BATCH | VARIATIONS[name])) as llm:
        assert greedy_ids(llm, prompts) == expected
        if name == "few blocks":
            assert llm.engine.coordinator.stats().preemptions > 0
        if name != "no prefix cache":
            # Again, with whatever the first round left in the cache.
            assert greedy_ids(llm, prompts) == expected
            assert llm.engine.coordinator.stats().cached_prompt_tokens > 0


@pytest.mark.parametrize("length_in_blocks", [1, 2])
@pytest.mark.parametrize("off_by", [-1, 0, 1])
def test_a_prompt_found_whole_in_the_cache(length_in_blocks: int, off_by: int, tiny: Callable[..., Any]) -> None:
    """Field report B21: at least one token is computed however much of the prompt is cached."""
    prompt = list(range(16 * length_in_blocks + off_by))
    with LLM(str(tiny("llama").folder), device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        first = llm.generate(prompt, params)[0]
        second = llm.generate(prompt, params)[0]
        twice = llm.generate([prompt, prompt], params)
    assert first.cached_tokens == 0
    assert second.cached_tokens == (len(prompt) - 1) // 16 * 16
    for output in (second, *twice):
        assert output.outputs[0].token_ids == first.outputs[0].token_ids


def test_sampling_rules_survive_preemption(tiny: Callable[..., Any]) -> None:
    """Field report B26: seed, penalties, min_tokens and max_tokens count over a preemption as without one."""
    rules = {
        "seed": 7,
        "temperature": 1.0,
        "presence_penalty": 1.5,
        "repetition_penalty": 1.3,
        "min_tokens": 40,
        "max_tokens": 64,
        "ignore_eos": False,
        "stop_token_ids": list(range(128)),
    }
    prompts = [list(range(start, start + 64)) for start in range(8)]
    folder = str(tiny("llama").folder)
    with LLM(folder, device="cpu", num_blocks=1000) as llm:
        ample = greedy_ids(llm, prompts, **rules)
    with LLM(folder, device="cpu", num_blocks=30, prefix_cache=True) as llm:
        tight = greedy_ids(llm, prompts, **rules)
        assert llm.engine.coordinator.stats().preemptions > 0
        streamed: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
        for chunk in llm.stream(prompts, SamplingParams(**rules)):
            streamed[chunk.prompt_index].extend(chunk.token_ids)
    assert tight == ample
    assert list(streamed.values()) == ample, "nothing is streamed twice or lost"
    assert all(40 < len(answer) <= 64 for answer in ample)


def test_seeded_choices_repeat_and_differ(tiny: Callable[..., Any]) -> None:
    """Field report B32: n choices of one seed differ from each other, and are the same when asked again."""
    params = SamplingParams(n=4, seed=3, temperature=1.0, max_tokens=16, ignore_eos=True)
    with LLM(str(tiny("llama").folder), device="cpu", num_blocks=64) as llm:
        runs = [llm.generate([1, 2, 3], params)[0] for _ in range(2)]
        alone = llm.generate([1, 2, 3], SamplingParams(seed=3, temperature=1.0, max_tokens=16, ignore_eos=True))[0]
    answers = [[choice.token_ids for choice in run.outputs] for run in runs]
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) == 4
    assert [choice.index for choice in runs[0].outputs] == [0, 1, 2, 3]
    assert alone.outputs[0].token_ids == answers[0][0], "the first choice is the one that n = 1 gives"


def test_unseeded_sampling_is_not_repeated(tiny: Callable[..., Any]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    with LLM(str(tiny("llama").folder), device="cpu") as llm:
        first, second = (output.outputs[0].token_ids for output in llm.generate([[5, 6], [5, 6]], params))
    assert first != second
