"""Tokenizers whose tokens are bytes, written with GPT-2's alphabet: one character stands for one byte.

Of such a token the bytes can be told without its neighbours, so the text of many is their bytes joined and decoded.
The alphabet: https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from paceline.launcher.rust_tokenizer import rust_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decoder_kinds(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The steps of a tokenizer's way from tokens to text, as tokenizer.json names them; none without such a file."""
    rust = rust_tokenizer(tokenizer)
    if rust is None or rust.decoder is None:
        return []
    described = json.loads(rust.decoder.__getstate__())
    steps = described.get("decoders")
    return [described["type"]] if steps is None else [step["type"] for step in steps]


class TokenBytes(dict[int, bytes]):
    """The bytes that each token id adds to a text, worked out when they are first asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skipped_ids: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(skipped_ids, b""))
        self._backend: Any = tokenizer.backend_tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        # Models have more output ids than their tokenizers have tokens; there is no text for those.
        data = self[token_id] = b"" if token is None else bytes_of(token)
        return data


@functools.lru_cache(maxsize=8)
def token_bytes(tokenizer: PreTrainedTokenizerBase, skipped_ids: frozenset[int]) -> TokenBytes | None:
    """The bytes of a tokenizer's tokens, one table for all who ask; None where texts are more than bytes joined.

    skipped_ids: tokens that add nothing.
    """
    return TokenBytes(tokenizer, skipped_ids) if decoder_kinds(tokenizer) == ["ByteLevel"] else None


def bytes_of(token: str) -> bytes:
    """The bytes of a token; one that has a character outside the alphabet is plain text, as added tokens may be."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_characters() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for U+0100 and up, in their order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
