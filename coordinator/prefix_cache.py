"""Finds the blocks that already hold the keys and values of a prompt's beginning.

A full block is known by its key, the 128-bit xxh3 of (its parent's key, its tokens), where the first block's parent is
the salt. Keys only find candidates. A hit is confirmed by comparing the tokens and the identity of the parent, link by
link from the first block on, so that two prompts with one key are never taken for each other.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Sequence, Set
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
        self._coming: set[bytes] = set()
        """Keys of what the plan being made computes: of each request the first block alone, since who shares a later
        one shares that."""
        self._last_serial = ROOT

    @property
    def block_ids(self) -> Set[int]:
        """The findable blocks, as they are at any time."""
        return self._by_block.keys()

    def begin_plan(self) -> None:
        """Take back what was announced for the plan before."""
        self._coming.clear()

    def match(self, chain: PrefixChain, token_ids: Sequence[int], max_blocks: int) -> PrefixMatch:
        """Find the leading blocks of token_ids, at most max_blocks, and point the chain at the last one found."""
        found: list[int] = []
        chain.num_published, chain.tip = 0, ROOT
        while self._enabled and chain.num_published < max_blocks:
            num_hashed = len(chain.keys)
            if chain.num_published == num_hashed:
                # Twice as many each time: a new prompt's first step need not wait for the hashes of all its blocks.
                self._extend(chain, token_ids, min(max(2 * num_hashed, 1), max_blocks))
            entry = self._follow(chain)
            if entry is None:
                return PrefixMatch(found, chain.keys[chain.num_published] in self._coming)
            found.append(entry.block_id)
        return PrefixMatch(found, next_is_coming=False)

    def announce(self, chain: PrefixChain, token_ids: Sequence[int], num_blocks: int) -> None:
        """Say that the plan being made computes what cannot be found yet of a request's first num_blocks blocks."""
        while self._enabled and chain.num_published < num_blocks:
            self._extend(chain, token_ids, chain.num_published + 1)
            if self._follow(chain) is None:
                self._coming.add(chain.keys[chain.num_published])
                return

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
        while chain.num_published < num_blocks:
            if self._follow(chain) is None:
                entry = self._by_key.get(chain.keys[chain.num_published])
                if entry is not None:
                    self.forget(entry.block_id)
                    displaced.append(entry.block_id)
                self._insert(block_ids[chain.num_published], chain)
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

    def _follow(self, chain: PrefixChain) -> _Entry | None:
        """Point the chain at its next block and return that, where it is findable."""
        index = chain.num_published
        entry = self._by_key.get(chain.keys[index])
        if entry is None or not entry.confirms(chain.tokens[index], chain.tip, chain.salt):
            return None
        chain.num_published += 1
        chain.tip = entry.serial
        return entry

    def _insert(self, block_id: int, chain: PrefixChain) -> None:
        """Make the chain's next block findable as this one, and point the chain at it."""
        index = chain.num_published
        key = chain.keys[index]
        self._last_serial += 1
        entry = _Entry(block_id, key, chain.tokens[index], chain.salt, chain.tip, self._last_serial)
        self._by_key[key] = entry
        self._by_block[block_id] = entry
        chain.num_published += 1
        chain.tip = entry.serial

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
