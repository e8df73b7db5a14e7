"""The text and the bytes of single tokens, as log-probabilities are reported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from paceline.coordinator.messages import TokenLogprobs
from paceline.launcher.byte_level import bytes_of, decoder_kinds
from paceline.launcher.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Looks tokens up in a tokenizer; every token is worked out once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend: Any = tokenizer.backend
        self._known: dict[int, tuple[str, bytes]] = {}
        self._byte_level = self._backend is not None and "ByteLevel" in decoder_kinds(self._backend)
        self._added = {} if self._backend is None else dict(self._backend.added_tokens_decoder)

    def __getitem__(self, token_id: int) -> tuple[str, bytes]:
        """The token's text and its bytes; a token that is a torn character has the text "bytes:\\xe4\\xbd"."""
        entry = self._known.get(token_id)
        if entry is None:
            data = self._bytes(token_id)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            entry = self._known[token_id] = (text, data)
        return entry

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens together, special ones included; none without a tokenizer."""
        if self._backend is None:
            return ""
        text: str = self._backend.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        token = None if self._backend is None else self._backend.convert_ids_to_tokens(token_id)
        if token is None:  # models have more output ids than their tokenizers have tokens
            return b""
        if self._byte_level:
            return bytes_of(token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return str(token).replace("\u2581", " ").encode()


def prompt_logprobs(
    token_texts: TokenTexts, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's shape of a prompt's log-probabilities: by token id, of each token and the `top` most likely ones.

    The first token has null: nothing came before it.
    """
    answer: list[dict[str, Any] | None] = [None]
    for token_id, each in zip(prompt[1:], logprobs, strict=True):
        best = zip(each.top_ids[:top], each.top[:top], range(1, top + 1), strict=False)
        answer.append(
            {
                str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_texts[token][0]}
                for token, logprob, rank in ((token_id, each.chosen, each.rank), *best)
            }
        )
    return answer


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it: OpenAI's -9999 stands for what is impossible."""
    return max(logprob, -9999.0)
