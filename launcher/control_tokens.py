"""Keeps what people write in a conversation from becoming control tokens (<|im_end|>), which would forge its turns.

Tokenizers find their special tokens anywhere in a text, whoever wrote them there. So before a chat template renders
messages, a mark is put into each special token's text that they hold: only those that the template itself writes are
found then. Of the tokens that come out, each stretch between two special tokens that has marks in it is tokenised
again, without the marks and by a tokenizer that looks for no special tokens: the model sees the text that was written.

The mark is U+FDD0, one of Unicode's noncharacters "intended for process-internal uses" (The Unicode Standard, 23.7).
It does not change what templates do with a text: they trim it, join it, or write it as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from paceline.launcher.encoder import Encoder
from paceline.launcher.rust_tokenizer import rust_tokenizer, without_special_tokens

MARK = "\ufdd0"


class ControlTokens:
    """The special tokens of one tokenizer. One without a tokenizer.json is left as it is: it finds none in texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._plain: Any = None
        """The Rust tokenizer that looks for no special tokens."""
        self._special_ids: frozenset[int] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        rust = rust_tokenizer(tokenizer)
        if rust is None:
            return
        self._plain = without_special_tokens(rust)
        special = {token_id: str(each) for token_id, each in tokenizer.added_tokens_decoder.items() if each.special}
        texts = sorted((text for text in special.values() if len(text) > 1), key=len, reverse=True)
        if texts:
            self._special_ids = frozenset(special)
            self._pattern = re.compile("|".join(map(re.escape, texts)))

    def guarded(self, value: Any) -> Any:
        """The same texts, lists and objects, with marks in the special tokens that their texts and keys hold."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(_marked, value)
        if isinstance(value, dict):
            # Names too: templates write tools and arguments as JSON, whose keys are the client's.
            return {self.guarded(key): self.guarded(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.guarded(each) for each in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text, which holds every special token that it needs; marked ones are plain text."""
        if MARK not in text or self._plain is None:
            return self._encoder.encode(text, add_special_tokens=False)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets: Sequence[tuple[int, int]] = encoding["offset_mapping"]
        token_ids: list[int] = []
        stretch: list[int] = []
        start = 0
        for token_id, (begin, end) in zip(encoding["input_ids"], offsets, strict=True):
            if token_id not in self._special_ids:
                stretch.append(token_id)
                continue
            token_ids += [*self._unmarked(text[start:begin], stretch), token_id]
            stretch, start = [], end
        return token_ids + self._unmarked(text[start:], stretch)

    def _unmarked(self, text: str, token_ids: list[int]) -> list[int]:
        """The token ids of a stretch of text without its marks; token_ids: those with them."""
        if MARK not in text:
            return token_ids
        plain_ids: list[int] = self._plain.encode(text.replace(MARK, ""), add_special_tokens=False).ids
        return plain_ids


def _marked(found: re.Match[str]) -> str:
    return found[0][0] + MARK + found[0][1:]
