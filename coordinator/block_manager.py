"""The ledger of the cache: which request holds which block of keys and values.

Every block is in one of three states: free (holds nothing worth keeping), cached (no request holds it, but the prefix
cache can find it) or used (held by one or more requests). Free blocks are handed out first, then the cached one that
was released longest ago. All operations cost O(1) a block.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.coordinator.prefix_cache import PrefixCache, PrefixChain, PrefixMatch

FREE, CACHED, SHARED = -1, -2, -3
"""What stands in `holders` for a block that is not held by one request alone."""


@dataclass(slots=True)
class BlockTable:
    """The blocks that one request holds, in the order of its tokens."""

    chain: PrefixChain
    block_ids: list[int] = field(default_factory=list)
    slot: int = 0
    """Of the request, while it holds blocks."""


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """How many blocks are in each state."""

    free: int
    cached: int
    used: int


class BlockManager:
    """Hands out blocks and takes them back.

    When a block becomes findable: once a plan that computes its last token has been made and its token values are
    known; while that plan is made, the block is announced. Executors run plans in order, so whoever finds the block
    reads it after it was written, even if the request that computes it is aborted or preempted meanwhile: a submitted
    plan still runs. A step that fails ends the engine, and the cache with it.
    """

    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache) -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._cache = cache
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        # An OrderedDict is a doubly linked list with an index: O(1) removal anywhere, oldest first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.block_holders = array("i", [FREE]) * num_blocks
        """int32 for each block: FREE, CACHED, the slot of the one request that took it, or SHARED once a second one did
        and until nobody holds it. Kept as it changes, so that who wants to see all blocks copies memory."""

    @property
    def available(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free) + len(self._cached)

    @property
    def usage(self) -> BlockUsage:
        return BlockUsage(len(self._free), len(self._cached), self._num_blocks - self.available)

    def begin_plan(self) -> None:
        """Nothing is announced yet for the plan made next."""
        self._cache.begin_plan()

    def match_prefix(self, table: BlockTable, token_ids: Sequence[int], *, use: bool = True) -> PrefixMatch:
        """Find the blocks that hold the beginning of token_ids, leaving at least one token to compute.

        use: false finds none, for a request that has to compute everything.
        Nothing is taken yet: hand the match to `allocate` before any other call.
        """
        return self._cache.match(table.chain, token_ids, (len(token_ids) - 1) // self.block_size if use else 0)

    def cost(self, match: PrefixMatch, num_tokens: int) -> int:
        """By how much `available` falls when num_tokens tokens that begin with the match are allocated."""
        revived = sum(self._holders[block_id] == 0 for block_id in match.block_ids)
        return self._blocks_for(num_tokens) - len(match.block_ids) + revived

    def allocate(self, table: BlockTable, match: PrefixMatch, num_tokens: int) -> None:
        """Fill an empty table with the matched blocks and new ones, enough for num_tokens tokens.

        The caller made sure that `cost` is at most `available`.
        """
        for block_id in match.block_ids:
            if self._holders[block_id] == 0:
                del self._cached[block_id]
                self.block_holders[block_id] = table.slot
            else:
                self.block_holders[block_id] = SHARED
            self._holders[block_id] += 1
        new = self._take(self._blocks_for(num_tokens) - len(match.block_ids), table.slot)
        table.block_ids = [*match.block_ids, *new]

    def append(self, table: BlockTable) -> int:
        """Add one block to a table and return its id. The caller made sure that one is available."""
        (block_id,) = self._take(1, table.slot)
        table.block_ids.append(block_id)
        return block_id

    def release(self, table: BlockTable) -> None:
        """Take back all blocks of a table; those that are findable stay so until they are handed out again."""
        holders, block_holders, findable = self._holders, self.block_holders, self._cache.block_ids
        # Last block first, so that the end of a prefix is forgotten before the beginning it hangs on.
        for block_id in reversed(table.block_ids):
            holders[block_id] -= 1
            if holders[block_id] == 0:
                if block_id in findable:
                    self._cached[block_id] = None
                    block_holders[block_id] = CACHED
                else:
                    self._free.append(block_id)
                    block_holders[block_id] = FREE
        table.block_ids = []

    def announce(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Say what `publish` will make findable once the plan being made, which computes it, is on its way."""
        self._cache.announce(table.chain, token_ids, self._num_full(token_ids, num_computed))

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Make findable what is full of known tokens and computed by the plans made so far.

        token_ids: all known ids; num_computed: how many leading tokens those plans compute.
        """
        num_full = self._num_full(token_ids, num_computed)
        if num_full <= table.chain.num_published:
            return
        for block_id in self._cache.publish(table.chain, token_ids, table.block_ids, num_full):
            if self._holders[block_id] == 0:
                del self._cached[block_id]
                self._free.append(block_id)
                self.block_holders[block_id] = FREE

    def check_invariants(self, tables: Iterable[BlockTable]) -> None:
        """Raise AssertionError where the ledger disagrees with itself or with tables, all those in use."""
        slots_of: dict[int, list[int]] = {}
        for table in tables:
            for block_id in table.block_ids:
                slots_of.setdefault(block_id, []).append(table.slot)
        holders = Counter({block_id: len(slots) for block_id, slots in slots_of.items()})
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            raise AssertionError("a block is free twice")
        if free & cached or (free | cached) & holders.keys():
            raise AssertionError("a block is in two states at once")
        if len(free) + len(cached) + len(holders) != self._num_blocks:
            raise AssertionError(
                f"{len(free)} free + {len(cached)} cached + {len(holders)} used blocks are not {self._num_blocks}"
            )
        for block_id, count in enumerate(self._holders):
            if count != holders[block_id]:
                raise AssertionError(f"block {block_id} counts {count} holders, but {holders[block_id]} tables name it")
        for block_id, shown in enumerate(self.block_holders):
            states = (FREE,) if block_id in free else (CACHED,) if block_id in cached else (SHARED, *slots_of[block_id])
            if shown not in states or (len(slots_of.get(block_id, ())) > 1 and shown != SHARED):
                raise AssertionError(f"block {block_id} is shown as {shown}, but is one of {states}")
        self._cache.check_invariants()
        if free & self._cache.block_ids:
            raise AssertionError("a free block is findable")
        if cached - self._cache.block_ids:
            raise AssertionError("a cached block is not findable")

    def _take(self, count: int, slot: int) -> list[int]:
        """Hand out so many blocks, which are available, to the request in a slot."""
        num_free = min(count, len(self._free))
        taken = [self._free.pop() for _ in range(num_free)]
        for _ in range(count - num_free):
            block_id, _ = self._cached.popitem(last=False)
            self._cache.forget(block_id)
            taken.append(block_id)
        for block_id in taken:
            self._holders[block_id] = 1
            self.block_holders[block_id] = slot
        return taken

    def _num_full(self, token_ids: Sequence[int], num_computed: int) -> int:
        return min(num_computed, len(token_ids)) // self.block_size

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
