"""The tokenizers library's own tokenizer, in Rust, within one of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer as RustTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rust_tokenizer(tokenizer: PreTrainedTokenizerBase) -> RustTokenizer | None:
    """What a tokenizer wraps; None for one that works in Python, or by another library.

    Who cuts or pads texts with either of the two changes what the other does.
    """
    # Only here: transformers takes as long to import as half of torch, and ranks without a tokenizer never need it.
    from transformers import PreTrainedTokenizerFast

    return tokenizer.backend_tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None


def without_special_tokens(rust: RustTokenizer) -> RustTokenizer:
    """Another tokenizer over the same vocabulary, which takes special tokens in a text for plain text.

    Nothing is copied: of a large vocabulary that takes longer than to read it. It neither cuts, pads, nor puts
    tokens around a text, and does not see what is changed in the first one later, but in its parts themselves.
    """
    plain = RustTokenizer(rust.model)
    plain.normalizer = rust.normalizer
    plain.pre_tokenizer = rust.pre_tokenizer
    added = rust.get_added_tokens_decoder()
    # All of them, so that each gets the id that it has there.
    plain.add_tokens([added[token_id] for token_id in sorted(added)])
    plain.encode_special_tokens = True
    return plain
