"""Token ids to text while they are generated: the join of the pieces is what decoding all ids at once gives.

Where tokens are bytes (launcher/byte_level.py) their text is that of the bytes, which Python decodes step by step.

Elsewhere a token's text depends on its neighbours: a character may be spread over several tokens, SentencePiece drops
the space before the first word, and a run of its byte tokens becomes text or, where any of it is no UTF-8, only U+FFFD.
So a window of the last tokens is decoded, and the part of its text that was not shown yet is new. Three rules make it
exact:

- A U+FFFD at the end of the text may be the beginning of a character: it is held back.
- While the last token is a byte token (`<0xE4>`), later ones may change the text of all byte tokens before it: nothing
  is shown until the run ends.
- The window keeps enough tokens that it holds a whole character, even if a torn one begins and a torn one ends it.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.launcher.byte_level import TokenBytes, token_bytes
from paceline.launcher.rust_tokenizer import rust_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")

WINDOW_LIMIT = 24
"""Tokens decoded at once before old ones are forgotten."""
WINDOW_KEPT = 12
"""At least a byte each: up to 3 of a character that began earlier, up to 3 of one that is not complete, and between
them more than the 4 of the longest character."""


class Detokenizer:
    """The text of one request's output, piece by piece."""

    __slots__ = ("_text",)

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """shown_ids: special tokens whose text is wanted all the same."""
        skipped_ids = _special_ids(tokenizer) - shown_ids if skip_special_tokens else frozenset()
        table = token_bytes(tokenizer, skipped_ids)
        self._text: _ByteText | _WindowText
        self._text = _WindowText(tokenizer, skipped_ids) if table is None else _ByteText(table)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these further output ids settle; what may still change is kept for later."""
        return self._text.feed(token_ids)

    def finish(self) -> str:
        """The rest of the text once no more ids come; a character that stayed incomplete is U+FFFD."""
        return self._text.finish()


class _ByteText:
    """Text of tokens that are bytes."""

    __slots__ = ("_bytes_of", "_torn")

    def __init__(self, table: TokenBytes) -> None:
        self._bytes_of = table.__getitem__
        self._torn = b""
        """The beginning of a character whose other bytes have not come yet."""

    def feed(self, token_ids: Sequence[int]) -> str:
        data = self._torn + b"".join(map(self._bytes_of, token_ids))
        text, decoded = codecs.utf_8_decode(data, "replace")
        self._torn = data[decoded:]
        return text

    def finish(self) -> str:
        text, self._torn = self._torn.decode(errors="replace"), b""
        return text


class _WindowText:
    """Text of tokens that change with their neighbours."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skipped_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        # The Rust tokenizer itself where there is one: the wrapper around it takes longer than it does.
        self._fast = rust_tokenizer(tokenizer)
        self._skipped_ids = skipped_ids
        self._window: list[int] = []
        self._shown = 0
        """How many characters of the window's text were returned."""

    def feed(self, token_ids: Sequence[int]) -> str:
        last_token = ""
        for token_id in token_ids:
            token = self._token(token_id)
            # Models have more output ids than their tokenizers have tokens; the tokenizer has no text for those.
            if token is not None and token_id not in self._skipped_ids:
                self._window.append(token_id)
                last_token = token
        if not last_token or BYTE_TOKEN.fullmatch(last_token):
            return ""
        text = self._decode(self._window)
        held = int(text.endswith(REPLACEMENT))
        piece = text[self._shown : len(text) - held]
        self._shown = len(text) - held
        if len(self._window) > WINDOW_LIMIT:
            del self._window[:-WINDOW_KEPT]
            self._shown = len(self._decode(self._window)) - held
        return piece

    def finish(self) -> str:
        return self._decode(self._window)[self._shown :]

    def _token(self, token_id: int) -> str | None:
        token: str | None
        if self._fast is not None:
            token = self._fast.id_to_token(token_id)
        else:
            token = self._tokenizer.convert_ids_to_tokens(token_id)
        return token

    def _decode(self, token_ids: list[int]) -> str:
        # What is to be skipped never entered the window.
        text: str
        if self._fast is not None:
            text = self._fast.decode(token_ids, skip_special_tokens=False)
            return text
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


@functools.lru_cache(maxsize=2)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that decode(skip_special_tokens=True) leaves out; left out of the window too, they do not fill it."""
    if tokenizer.is_fast:
        return frozenset(token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(tokenizer.all_special_ids)
