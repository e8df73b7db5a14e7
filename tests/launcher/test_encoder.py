"""Text has the ids that transformers' own encode gives, whatever a file says of cutting and padding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.launcher.control_tokens import MARK
from paceline.launcher.encoder import Encoder

PARTS = [*"ab ,.'\n\t1Ä海🫠", MARK, "<|im_start|>", "<|im_end|>", "<|endoftext|>", "don't", " hello"]


@pytest.fixture
def tokenizer(default_model: Path) -> PreTrainedTokenizerFast:
    """One whose Rust tokenizer cuts at 8 tokens and pads to 16."""
    made = AutoTokenizer.from_pretrained(default_model)
    made.backend_tokenizer.enable_truncation(8)
    made.backend_tokenizer.enable_padding(length=16)
    assert isinstance(made, PreTrainedTokenizerFast)
    return made


@pytest.mark.parametrize("split", [False, True])
def test_the_ids_are_those_of_the_tokenizer_around_it(tokenizer: PreTrainedTokenizerFast, split: bool) -> None:
    tokenizer.split_special_tokens = split
    encoder = Encoder(tokenizer)
    rng = random.Random(1)
    texts = ["", *("".join(rng.choices(PARTS, k=rng.randint(1, 60))) for _ in range(300))]
    for special in (False, True):
        got = [encoder.encode(text, add_special_tokens=special) for text in texts]
        assert got == [tokenizer.encode(text, add_special_tokens=special) for text in texts]
    assert max(map(len, got)) > 16
