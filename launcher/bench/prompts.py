"""Prompts of an exact number of tokens, as JSON, made of words that are one token each to the model's tokenizer."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

from paceline.coordinator.errors import InputError
from paceline.launcher.bench.plan import PlannedRequest
from paceline.launcher.bench.traces import BLOCK_TOKENS
from paceline.launcher.bench.words import WORDS

Encode = Callable[[str], Awaitable[Sequence[int]]]
"""Token ids of a text without special tokens."""
FEWEST_WORDS = 32
"""With fewer, prompts that are to be different would begin alike."""


async def one_token_words(encode: Encode) -> tuple[list[str], list[int]]:
    """Those of WORDS that are one token each where a space stands before them, and the ids of these tokens.

    Groups are halved until all words of each are single tokens, so a tokenizer that knows nearly all is asked little.
    Raises InputError where there are too few.
    """

    async def single(words: Sequence[str]) -> list[str]:
        count = len(await encode("the " + " ".join(words))) - 1
        if count == len(words):
            return list(words)
        if len(words) == 1:
            return []
        middle = len(words) // 2
        return [*await single(words[:middle]), *await single(words[middle:])]

    words = await single(WORDS)
    if len(words) < FEWEST_WORDS:
        raise InputError(
            f"only {len(words)} common words are single tokens to this tokenizer, too few to make prompts of exact "
            "lengths; name another with --tokenizer"
        )
    ids = list(await encode("the " + " ".join(words)))[1:]
    return words, ids


class PromptMaker:
    """Makes the prompt of any planned request; the same seed makes the same prompts.

    Requests of a trace with block ids share what their blocks share; all others share no more than chance has it.
    """

    def __init__(self, pieces: Sequence[str], separator: str, seed: int, *, overhead: int = 0) -> None:
        """pieces: one token each, as they stand in JSON, joined by separator.

        overhead: tokens that the server itself adds to a prompt, which are taken off.
        """
        self._pieces = [piece.encode() for piece in pieces]
        self._separator = separator.encode()
        self._seed = seed
        self.overhead = overhead
        self._blocks: dict[int, bytes] = {}

    def prompt(self, request: PlannedRequest) -> bytes:
        """Of as many tokens as planned, though at least one beside the server's own."""
        tokens = max(1, request.prompt_tokens - self.overhead)
        if request.block_ids is None:
            return self._draw(f"request {request.number}", tokens)
        full, rest = divmod(tokens, BLOCK_TOKENS)
        parts = [self._block(block) for block in request.block_ids[:full]]
        if rest:
            parts.append(self._draw(f"block {request.block_ids[full]}", rest))
        return self._separator.join(parts)

    def _block(self, block: int) -> bytes:
        if block not in self._blocks:
            self._blocks[block] = self._draw(f"block {block}", BLOCK_TOKENS)
        return self._blocks[block]

    def _draw(self, what: str, tokens: int) -> bytes:
        rng = random.Random(f"{what} {self._seed}")
        return self._separator.join(rng.choices(self._pieces, k=tokens))
