"""Grammars over a model's tokenizer: checked, compiled and followed by llguidance.

What takes longer than a mask runs on a thread of its own, and llguidance gives up Python's lock meanwhile. Its limits
(its own defaults, but for the memory of one answer) bound what a hostile grammar costs: some 20 ms a mask.

llguidance: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import llguidance.numpy
import numpy as np

from paceline.coordinator.constraints import GrammarError, Mask
from paceline.coordinator.errors import InputError
from paceline.launcher.rust_tokenizer import rust_tokenizer
from paceline.launcher.tokenizer import Tokenizer

MAX_LEXER_STATES = 20_000
"""Of one answer, up to 4 kB each."""

MAX_REMEMBERED = 256
"""Grammars that were found good, by their hashes: most callers send the same ones again."""

_EXCERPT = re.compile(r"\s*(\d+ \|.*|\^+\s*)")
"""A line of a message that shows the grammar, or points into it."""
_FULL_ROW = re.compile(r"Current row has (\d+) items; max is (\d+)")
_SPECIAL_TOKEN = b"\xff"
"""Begins one, among bytes that llguidance forces; no UTF-8 holds it."""


class TokenizerGrammars:
    """The coordinator's Grammars over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """vocab_size: the model's, which may differ from the tokenizer's; end_ids: allowed where an answer may end,
        but for those that are no tokens of the tokenizer's.

        Raises InputError where there is no tokenizer, or none that llguidance can read.
        """
        if tokenizer.backend is None:
            raise InputError("a grammar needs a tokenizer, and this model has none")
        if rust_tokenizer(tokenizer.backend) is None:
            raise InputError("a grammar needs a tokenizer of the tokenizers library, and this model has another one")
        self._backend = tokenizer.backend
        self._vocab_size = vocab_size
        self._end_ids = [token for token in end_ids if token < len(tokenizer.backend)]
        self._limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._executor = llguidance.LLExecutor()
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._good: dict[bytes, None] = {}
        self._tokens: llguidance.LLTokenizer | None = None

    def prepare(self) -> None:
        """Do now what the first grammar would have to wait for: about a second, in which no other thread runs."""
        self._tokenizer()

    def is_known(self, grammar: str) -> bool:
        """Whether a grammar was found good before, so that `check` takes no time."""
        return _digest(grammar) in self._good

    def check(self, grammar: str) -> None:
        """Raise InputError, one line, where a grammar cannot be used. Takes as long as to compile it, the first time.

        What has been compiled is not kept for answers: copies of a matcher share its states, and their limit.
        """
        if self.is_known(grammar):
            return
        try:
            matcher, _ = self._compile(grammar)
            self._begin(matcher)
        except GrammarError as error:
            raise InputError(str(error)) from error
        self._good[_digest(grammar)] = None
        if len(self._good) > MAX_REMEMBERED:
            self._good.pop(next(iter(self._good)), None)  # None: another thread may have been faster

    def begin_check(self, grammar: str) -> Future[None]:
        """Check on the thread of its own."""
        return self._threads.submit(self.check, grammar)

    def compile(self, grammar: str) -> Future[tuple[object, Mask]]:
        """Compile on the thread of its own; see Grammars."""
        return self._threads.submit(self._compile, grammar)

    def _compile(self, grammar: str) -> tuple[llguidance.LLMatcher, Mask]:
        matcher = llguidance.LLMatcher(self._tokenizer(), grammar, log_level=0, limits=self._limits)
        mask = self._masks([matcher])[0]
        if isinstance(mask, GrammarError):
            raise mask
        return matcher, mask

    def _begin(self, matcher: llguidance.LLMatcher) -> None:
        """Take in what every answer begins with: too many properties of an object show only after its brace."""
        forced = matcher.compute_ff_bytes().partition(_SPECIAL_TOKEN)[0]
        matcher.consume_tokens(self._tokenizer().tokenize_bytes(forced))
        mask = self._masks([matcher])[0]
        if isinstance(mask, GrammarError):
            raise mask

    def advance(self, steps: Sequence[tuple[object, int]]) -> Sequence[Mask | GrammarError]:
        """Take in the tokens, and work out the masks on several cores; see Grammars."""
        llguidance.numpy.consume_token_par(self._executor, steps)  # type: ignore[arg-type]
        return self._masks([matcher for matcher, _ in steps])  # type: ignore[misc]

    def _masks(self, matchers: Sequence[llguidance.LLMatcher]) -> list[Mask | GrammarError]:
        size = max(self._vocab_size, self._tokenizer().vocab_size)
        bits = llguidance.numpy.allocate_token_bitmask(len(matchers), size)
        llguidance.numpy.fill_next_token_bitmask_par(
            self._executor, [(matcher, row) for row, matcher in enumerate(matchers)], bits
        )
        words = bits[:, : -(-self._vocab_size // 32)]
        if self._vocab_size % 32:
            words[:, -1] &= np.int32((1 << self._vocab_size % 32) - 1)
        # A matcher that has erred allows the end ids: it is asked after each mask.
        return [
            GrammarError(_one_line(matcher.get_error())) if matcher.is_error() else row.tobytes()
            for matcher, row in zip(matchers, words, strict=True)
        ]

    def _tokenizer(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokens is None:
                from llguidance import hf  # only here: it imports transformers

                size = max(self._vocab_size, len(self._backend))
                self._tokens = hf.from_tokenizer(self._backend, size, self._end_ids or None)
            return self._tokens


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()


def _one_line(message: str) -> str:
    """llguidance's words without its excerpts of the grammar, and without all special tokens that there are."""
    if message.startswith("NoExtension"):
        return "it allows no answer at all"
    if found := _FULL_ROW.search(message):
        return (
            f"there are too many ways to go on at one place ({found[1]} for llguidance, which follows {found[2]}); "
            "an object of a JSON schema may have about 490 properties that are not required"
        )
    lines = [line.strip() for line in message.splitlines() if not _EXCERPT.fullmatch(line)]
    return " ".join(lines).partition("; following special tokens")[0].removesuffix("<non-verbose/>").strip()
