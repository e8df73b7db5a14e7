"""Text to token ids by the Rust tokenizer itself, where there is one: what is around it takes half as long again."""

from __future__ import annotations

from typing import Any

from paceline.launcher.rust_tokenizer import rust_tokenizer


class Encoder:
    """Gives the ids that a tokenizer's own `encode` gives."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: of transformers; who else has it cut or pad a text changes what its Rust tokenizer does later."""
        self._tokenizer = tokenizer
        self._rust: Any = rust_tokenizer(tokenizer)
        if self._rust is not None:
            tokenizer.encode("")  # options that a file has for cutting and padding are off from here

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text; add_special_tokens: with those that the tokenizer puts around it."""
        if self._rust is None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        # Alone among its methods this one does not work out where in the text each token stands.
        (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids
