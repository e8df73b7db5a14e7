"""Streamed text is the text: for each family of tokenizers, however the ids are cut, nothing is lost, added or torn.

Field reports B14 (characters over several tokens) and B18 (spaces between pieces).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.launcher.default_model import default_model_path
from paceline.launcher.detokenizer import Detokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog; don't, stop. It's 12 + 30 = 42!",
    "def reverse(text):\n\treturn text[::-1]\n\n\n  # a  b   c",
    "Ein Bär saß überm Fluß, où êtes-vous? Ça va, señor.",
    "你好,世界。今天天气很好。你好你好",
    "Привет, мир! Как дела? Γειά σου Κόσμε. नमस्ते दुनिया। こんにちは世界",
    "🫠🥹龜 👩‍👩‍👧‍👦 🌶️ 🇫🇷",
]
TEXTS = [
    *CORPUS,
    "a\U0001fae0\U0001f979龜 b",
    " leading space",
    "a  b\n\n  c",
    "don't , stop .",
    "\n",
    "  ",
    "བོད་སྐད",
    "\ufffd a \ufffd\ufffd",
]
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPECIAL = ["<unk>", "<s>", "</s>"]
ADDED = [AddedToken("<think>", special=False), AddedToken("<|reserved|>", special=True)]


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens(ADDED[:1])
    tokenizer.add_special_tokens(ADDED[1:])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=True
    )


def byte_level(split: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE as Qwen2, Llama-3 and SmolLM2 have, small enough that most characters are torn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return wrap(tokenizer)


def sentencepiece(decoder: Any, normalizer: Any, text: str = "abcdefghijklmnopqrstuvwxyz é") -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE with byte fallback: the words of Latin scripts, and bytes for everything else."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(
        [line for line in CORPUS if line.isascii()],
        trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, initial_alphabet=list(text)),
    )
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.decoder = decoder
    return wrap(tokenizer)


def llama2() -> PreTrainedTokenizerFast:
    return sentencepiece(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


def gemma() -> PreTrainedTokenizerFast:
    return sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        normalizers.Replace(" ", "▁"),
    )


def unigram() -> PreTrainedTokenizerFast:
    """Unigram with Metaspace, as T5 has."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    )
    return wrap(tokenizer)


FAMILIES: dict[str, Callable[[], Any]] = {
    "smollm2": lambda: AutoTokenizer.from_pretrained(default_model_path()),
    "qwen2": lambda: byte_level(QWEN2_SPLIT),
    "llama3": lambda: byte_level(LLAMA3_SPLIT),
    "llama2": llama2,
    "gemma": gemma,
    "unigram": unigram,
}


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """One tokenizer of each family."""
    return FAMILIES[request.param]()


def stream(tokenizer: Any, ids: Sequence[int], step: int = 1, skip_special_tokens: bool = True) -> list[str]:
    """The pieces, the rest at the end included."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.feed(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, detokenizer.finish()]


def whole(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text


@pytest.mark.parametrize("step", [1, 2, 8])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_join_of_the_pieces_is_the_whole_text(tokenizer: Any, step: int, skip_special_tokens: bool) -> None:
    for text in [*TEXTS, "".join(TEXTS), "</s>".join(TEXTS), "<|reserved|>".join(TEXTS), "<think>".join(TEXTS)]:
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids, step, skip_special_tokens)
        assert "".join(pieces) == whole(tokenizer, ids, skip_special_tokens)


@pytest.mark.parametrize("step", [1, 2, 8])
def test_any_ids_at_all_stream_to_their_whole_text(tokenizer: Any, step: int) -> None:
    """Random ids: torn characters, lone bytes, special tokens, and ids past the tokenizer's last token."""
    random_ids = random.Random(step)
    most = len(tokenizer) + 3
    for _ in range(200):
        ids = [random_ids.randrange(most) for _ in range(random_ids.randrange(120))]
        skip = random_ids.random() < 0.7
        assert "".join(stream(tokenizer, ids, step, skip)) == whole(tokenizer, ids, skip), ids


def test_bytes_of_torn_characters_in_any_order_stream_to_their_whole_text(tokenizer: Any) -> None:
    """Mostly ids that stand for parts of characters (unigram has none)."""
    words = tokenizer.encode("the fox </s>")
    parts = [i for i in range(len(tokenizer)) if "\ufffd" in whole(tokenizer, [i])] or words
    chosen = random.Random(0)
    for _ in range(300):
        ids = [chosen.choice(parts if chosen.random() < 0.85 else words) for _ in range(chosen.randrange(1, 100))]
        assert "".join(stream(tokenizer, ids)) == whole(tokenizer, ids), ids


def test_whole_characters_never_show_as_replacement_characters(tokenizer: Any) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text.replace("\ufffd", ""))
        shown = "".join(stream(tokenizer, ids))
        assert "\ufffd" not in shown
        assert shown == whole(tokenizer, ids)


def test_output_that_ends_within_a_character_is_the_same_streamed_or_not(tokenizer: Any) -> None:
    ids = tokenizer.encode("a\U0001fae0\U0001f979龜 b")
    for end in range(len(ids) + 1):
        for step in (1, 2, 8):
            assert "".join(stream(tokenizer, ids[:end], step)) == whole(tokenizer, ids[:end])


def test_text_is_shown_as_soon_as_its_characters_are_whole() -> None:
    tokenizer = byte_level(QWEN2_SPLIT)
    ids = tokenizer.encode("ab🫠c")
    shown = ""
    detokenizer = Detokenizer(tokenizer)
    for count, token in enumerate(ids, start=1):
        shown += detokenizer.feed([token])
        assert shown == whole(tokenizer, ids[:count]).rstrip("\ufffd")


def test_an_id_without_text_holds_nothing_back() -> None:
    tokenizer = byte_level(QWEN2_SPLIT)
    word = tokenizer.encode("fox")
    for silent in silent_ids(tokenizer):
        assert Detokenizer(tokenizer).feed([*word, silent]) == "fox"


def silent_ids(tokenizer: Any) -> list[int]:
    """Special tokens, and an id past the tokenizer's last."""
    return [*tokenizer.convert_tokens_to_ids(["</s>", "<|reserved|>"]), len(tokenizer) + 1]


class CountingTokenizer:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        text: str = self._tokenizer.decode(ids, **options)
        return text


def endless(tokenizer: Any) -> list[list[int]]:
    """Streams of which one kind of token makes up nearly all."""
    silents = silent_ids(tokenizer)
    parts = [i for i in range(len(tokenizer)) if "\ufffd" in whole(tokenizer, [i])]
    return [
        tokenizer.encode(" ".join(CORPUS)) * 10,
        *([silent] * 2000 for silent in silents),
        *((tokenizer.encode(" the fox") + [silent] * 40) * 50 for silent in silents),
        *([part] * 2000 for part in parts[::20]),
        (parts * 2000)[:2000],
    ]


def test_the_work_for_a_token_does_not_grow_with_the_length() -> None:
    for tokenizer in (byte_level(QWEN2_SPLIT), llama2()):
        for ids in endless(tokenizer):
            counting = CountingTokenizer(tokenizer)
            assert "".join(stream(counting, ids)) == whole(tokenizer, ids)
            assert counting.decoded <= 30 * len(ids)
