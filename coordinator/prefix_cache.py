"""Finds the blocks that already hold the keys and values of a prompt's beginning.

A full block is known by its key, the 128-bit xxh3 of (its parent's key, its tokens), where the first block's parent is
the salt. Keys only find candidates. A hit is confirmed by comparing the tokens and the identity of the parent, link by
link from the first block on, so that two prompts with one key are never taken for each other.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import xxhash

ROOT = 0
"""Serial number that stands for the parent of a first block."""


def secret_digest() -> Callable[[bytes], bytes]:
    """A 128-bit hash under a seed drawn for this process, so that nobody outside can prepare colliding prompts."""
    return partial(xxhash.xxh3_128_digest, seed=secrets.randbits(64))


@dataclass(slots=True)
class PrefixChain:
    """The full blocks of one request, as keys; it grows with the request's tokens and is never recomputed."""

    salt: str
    keys: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    """Per block, its token ids as int32 bytes."""
    num_published: int = 0
    """Leading blocks that the cache knew when they were last matched or published."""
    tip: int = ROOT
    """Serial number of the last of these."""


@dataclass(slots=True)
class PrefixMatch:
    """What the cache holds of a chain."""

    block_ids: list[int]
    """The leading blocks found, in order."""
    next_is_coming: bool
    """Whether the plan being made computes the block after these, so that the next plan can use it."""


@dataclass(slots=True)
class _Entry:
    """One findable block."""

    block_id: int
    key: bytes
    tokens: bytes
    salt: str
    parent: int
    serial: int
    born: int

    def confirms(self, tokens: bytes, parent: int, salt: str) -> bool:
        return self.parent == parent and self.tokens == tokens and self.salt == salt


class PrefixCache:
    """The findable blocks, by key and by block id.

    Serial numbers are never reused: an entry whose parent was forgotten is not found again, whatever its key.
    """

    def __init__(
        self, block_size: int, *, enabled: bool = True, digest: Callable[[bytes], bytes] | None = None
    ) -> None:
        """enabled: false finds and publishes nothing; digest: the hash of the keys, `secret_digest()` unless given."""
        self._block_size = block_size
        self._enabled = enabled
        self._digest = digest or secret_digest()
        self._by_key: dict[bytes, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._last_serial = ROOT
        self._plan = 0

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def begin_plan(self) -> None:
        """Make what was published so far findable; what is published from here on is so for the next plan."""
        self._plan += 1

    def match(self, chain: PrefixChain, token_ids: Sequence[int], max_blocks: int) -> PrefixMatch:
        """Find the leading blocks of token_ids, at most max_blocks, and point the chain at the last one found."""
        if not self._enabled:
            return PrefixMatch([], next_is_coming=False)
        self._extend(chain, token_ids, max_blocks)
        found: list[int] = []
        parent = ROOT
        coming = False
        for key, tokens in zip(chain.keys[:max_blocks], chain.tokens, strict=False):
            entry = self._by_key.get(key)
            if entry is None or not entry.confirms(tokens, parent, chain.salt):
                break
            if entry.born == self._plan:
                coming = True
                break
            found.append(entry.block_id)
            parent = entry.serial
        chain.num_published = len(found)
        chain.tip = parent
        return PrefixMatch(found, coming)

    def publish(
        self, chain: PrefixChain, token_ids: Sequence[int], block_ids: Sequence[int], num_blocks: int
    ) -> list[int]:
        """Make a request's first num_blocks blocks, all full, findable.

        A block whose equal is findable already stays private. Returns the blocks that are no longer findable because
        a new one took their key.
        """
        if not self._enabled:
            return []
        self._extend(chain, token_ids, num_blocks)
        displaced: list[int] = []
        for index in range(chain.num_published, num_blocks):
            key, tokens = chain.keys[index], chain.tokens[index]
            entry = self._by_key.get(key)
            if entry is None or not entry.confirms(tokens, chain.tip, chain.salt):
                if entry is not None:
                    self.forget(entry.block_id)
                    displaced.append(entry.block_id)
                entry = self._insert(block_ids[index], key, tokens, chain)
            chain.tip = entry.serial
        chain.num_published = num_blocks
        return displaced

    def forget(self, block_id: int) -> None:
        """Make a block unfindable, since it is about to hold something else."""
        entry = self._by_block.pop(block_id)
        del self._by_key[entry.key]

    def check_invariants(self) -> None:
        """Raise AssertionError where the two indexes disagree."""
        if len(self._by_key) != len(self._by_block):
            raise AssertionError(f"{len(self._by_key)} keys stand for {len(self._by_block)} findable blocks")
        for block_id, entry in self._by_block.items():
            if entry.block_id != block_id or self._by_key.get(entry.key) is not entry:
                raise AssertionError(f"block {block_id} is findable under a key that leads elsewhere")

    def _insert(self, block_id: int, key: bytes, tokens: bytes, chain: PrefixChain) -> _Entry:
        self._last_serial += 1
        entry = _Entry(block_id, key, tokens, chain.salt, chain.tip, self._last_serial, self._plan)
        self._by_key[key] = entry
        self._by_block[block_id] = entry
        return entry

    def _extend(self, chain: PrefixChain, token_ids: Sequence[int], num_blocks: int) -> None:
        """Hash the blocks that the chain lacks, up to num_blocks."""
        first = len(chain.keys)
        if first >= num_blocks:
            return
        size = self._block_size
        packed = array("i", token_ids[first * size : num_blocks * size]).tobytes()
        stride = len(packed) // (num_blocks - first)  # bytes of one block
        parent_key = chain.keys[-1] if chain.keys else self._digest(chain.salt.encode())
        for start in range(0, len(packed), stride):
            tokens = packed[start : start + stride]
            parent_key = self._digest(parent_key + tokens)
            chain.keys.append(parent_key)
            chain.tokens.append(tokens)
