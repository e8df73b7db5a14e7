"""The ledger of blocks: who holds what, what is found again, and what is given up first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.coordinator.block_manager import CACHED, FREE, SHARED, BlockManager, BlockTable, BlockUsage
from paceline.coordinator.prefix_cache import PrefixCache, PrefixChain

SIZE = 4


def new_manager(num_blocks: int, *, share: bool = True) -> BlockManager:
    return BlockManager(num_blocks, SIZE, PrefixCache(SIZE, enabled=share))


def take(manager: BlockManager, tokens: list[int], salt: str = "") -> BlockTable:
    """Allocate and compute tokens, as a prompt of its own plan."""
    table = BlockTable(PrefixChain(salt))
    manager.begin_plan()
    match = manager.match_prefix(table, tokens)
    before = manager.available
    cost = manager.cost(match, len(tokens))
    manager.allocate(table, match, len(tokens))
    assert before - manager.available == cost
    manager.publish(table, tokens, len(tokens))
    return table


def hits(manager: BlockManager, tokens: list[int], salt: str = "") -> int:
    manager.begin_plan()
    return len(manager.match_prefix(BlockTable(PrefixChain(salt)), tokens).block_ids)


def test_blocks_come_and_go():
    manager = new_manager(6)
    table = take(manager, [1] * 9)
    assert len(table.block_ids) == 3
    assert manager.usage == BlockUsage(free=3, cached=0, used=3)
    manager.append(table)
    assert manager.usage.used == 4
    manager.release(table)
    assert manager.usage == BlockUsage(free=4, cached=2, used=0)
    manager.check_invariants([])


def test_each_block_tells_whose_it_is():
    manager = new_manager(5)
    tables = [BlockTable(PrefixChain(""), slot=slot) for slot in (3, 7)]
    for table, last in zip(tables, (2, 3), strict=True):
        manager.begin_plan()
        tokens = [1] * 4 + [last]
        manager.allocate(table, manager.match_prefix(table, tokens), len(tokens))
        manager.publish(table, tokens, len(tokens))
    (prefix, own), (_, other) = (table.block_ids for table in tables)

    def told() -> dict[int, int]:
        manager.check_invariants(tables)
        return {block: holder for block, holder in enumerate(manager.block_holders) if holder != FREE}

    assert told() == {prefix: SHARED, own: 3, other: 7}
    manager.release(tables[0])
    assert told() == {prefix: SHARED, other: 7}
    manager.release(tables[1])
    assert told() == {prefix: CACHED}
    tables[0].slot = 5
    manager.begin_plan()
    manager.allocate(tables[0], manager.match_prefix(tables[0], [1] * 5), 5)
    assert sorted(told().values()) == [5, 5]


@pytest.mark.parametrize(("length", "expected"), [(7, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_one_token_is_always_left_to_compute(length, expected):
    manager = new_manager(10)
    manager.release(take(manager, [1] * 16))
    assert hits(manager, [1] * length) == expected


def test_sharing_counts_holders():
    manager = new_manager(10)
    first, second = take(manager, [1] * 8 + [2]), take(manager, [1] * 8 + [3])
    assert first.block_ids[:2] == second.block_ids[:2]
    assert first.block_ids[2] != second.block_ids[2]
    manager.check_invariants([first, second])
    manager.release(first)
    assert manager.usage == BlockUsage(free=7, cached=0, used=3)
    manager.check_invariants([second])
    manager.release(second)
    assert manager.usage == BlockUsage(free=8, cached=2, used=0)


def test_a_block_not_full_is_never_found():
    manager = new_manager(10)
    table = BlockTable(PrefixChain(""))
    manager.allocate(table, manager.match_prefix(table, [1] * 12), 12)
    manager.publish(table, [1] * 12, 7)
    assert hits(manager, [1] * 12) == 1


def test_a_block_of_unknown_tokens_is_never_found():
    manager = new_manager(10)
    table = BlockTable(PrefixChain(""))
    manager.allocate(table, manager.match_prefix(table, [1] * 7), 7)
    manager.publish(table, [1] * 7, 8)  # the eighth token is computed, but its value is still on its way
    assert hits(manager, [1] * 9) == 1
    manager.publish(table, [1] * 8, 8)
    assert hits(manager, [1] * 9) == 2


def test_free_blocks_go_before_cached_ones_and_those_released_longest_ago_before_others():
    manager = new_manager(5)
    old, new = take(manager, [1] * 4), take(manager, [2] * 4)
    manager.release(old)
    manager.release(new)
    take(manager, [3] * 12)
    assert (hits(manager, [1] * 5), hits(manager, [2] * 5)) == (1, 1)
    take(manager, [4] * 4)
    assert (hits(manager, [1] * 5), hits(manager, [2] * 5)) == (0, 1)


def test_being_shared_again_makes_a_block_young():
    manager = new_manager(4)
    first, second = take(manager, [1] * 4), take(manager, [2] * 4)
    manager.release(first)
    manager.release(second)
    manager.release(take(manager, [1] * 5))
    take(manager, [3] * 9)
    assert (hits(manager, [1] * 5), hits(manager, [2] * 5)) == (1, 0)


def test_the_end_of_a_prefix_is_given_up_before_its_beginning():
    manager = new_manager(3)
    manager.release(take(manager, [1] * 12))
    take(manager, [2])
    assert hits(manager, [1] * 13) == 2
    take(manager, [3])
    assert hits(manager, [1] * 13) == 1


def test_without_a_cache_nothing_is_shared():
    manager = new_manager(4, share=False)
    manager.release(take(manager, [1] * 8))
    assert hits(manager, [1] * 8) == 0
    assert manager.usage == BlockUsage(free=4, cached=0, used=0)
    manager.check_invariants([])


def test_the_check_finds_a_table_that_was_forgotten():
    manager = new_manager(4)
    take(manager, [1] * 8)
    with pytest.raises(AssertionError, match="used blocks are not 4"):
        manager.check_invariants([])


def test_the_check_finds_a_table_that_holds_a_released_block():
    manager = new_manager(4)
    table = take(manager, [1] * 8)
    copy = BlockTable(table.chain, list(table.block_ids))
    manager.release(table)
    with pytest.raises(AssertionError, match="two states"):
        manager.check_invariants([copy])


class Ledger(RuleBasedStateMachine):
    """Any order of operations keeps the ledger right, and whatever is found holds the tokens it is found for."""

    @initialize(num_blocks=st.integers(1, 12), collide=st.booleans())
    def start(self, num_blocks: int, collide: bool) -> None:
        digest = (lambda data: bytes([sum(data) % 2])) if collide else None
        self.manager = BlockManager(num_blocks, SIZE, PrefixCache(SIZE, digest=digest))
        self.open: list[tuple[BlockTable, list[int]]] = []
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from(["", "a"]))
    def admit(self, tokens: list[int], salt: str) -> None:
        table = BlockTable(PrefixChain(salt))
        self.manager.begin_plan()
        match = self.manager.match_prefix(table, tokens)
        assert len(match.block_ids) * SIZE < len(tokens)
        for index, block_id in enumerate(match.block_ids):
            assert self.contents[block_id] == (salt, tuple(tokens[: (index + 1) * SIZE]))
        if self.manager.cost(match, len(tokens)) > self.manager.available:
            return
        self.manager.allocate(table, match, len(tokens))
        self.write(table, tokens, len(match.block_ids))
        self.open.append((table, tokens))

    @precondition(lambda self: self.open and self.manager.available)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        table, tokens = data.draw(st.sampled_from(self.open))
        if len(tokens) % SIZE == 0:
            self.manager.append(table)
        tokens.append(token)
        self.write(table, tokens, (len(tokens) - 1) // SIZE)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.manager.release(table)

    @invariant()
    def ledger_is_right(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_invariants(table for table, _ in self.open)

    def write(self, table: BlockTable, tokens: list[int], first_block: int) -> None:
        for index in range(first_block, len(table.block_ids)):
            self.contents[table.block_ids[index]] = (table.chain.salt, tuple(tokens[: (index + 1) * SIZE]))
        self.manager.publish(table, tokens, len(tokens))


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
