"""What the prefix cache finds, and what it must never take for equal."""

from __future__ import annotations

import pytest

from paceline.coordinator.prefix_cache import PrefixCache, PrefixChain, secret_digest

SIZE = 2


def same_key(data: bytes) -> bytes:
    return b"k" * 16


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(SIZE)


def publish(cache: PrefixCache, tokens: list[int], block_ids: list[int], salt: str = "") -> list[int]:
    return cache.publish(PrefixChain(salt), tokens, block_ids, len(block_ids))


def find(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    return cache.match(PrefixChain(salt), tokens, len(tokens) // SIZE).block_ids


def test_the_longest_known_beginning_is_found(cache):
    publish(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert find(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == [10, 11, 12]
    assert find(cache, [1, 2, 3, 4, 9, 9]) == [10, 11]
    assert find(cache, [1, 2, 3]) == [10]
    assert find(cache, [1, 9, 3, 4]) == []


def test_no_more_blocks_are_found_than_asked_for(cache):
    publish(cache, [1, 2, 3, 4], [10, 11])
    assert cache.match(PrefixChain(""), [1, 2, 3, 4], 1).block_ids == [10]


def test_equal_blocks_after_different_beginnings_differ(cache):
    publish(cache, [1, 2, 7, 7], [10, 11])
    publish(cache, [3, 4, 7, 7], [12, 13])
    assert find(cache, [3, 4, 7, 7]) == [12, 13]
    assert find(cache, [7, 7]) == []


def test_salts_share_nothing(cache):
    publish(cache, [1, 2], [10], salt="tenant a")
    assert find(cache, [1, 2], salt="tenant b") == []
    assert find(cache, [1, 2]) == []
    assert find(cache, [1, 2], salt="tenant a") == [10]


def look(cache: PrefixCache, tokens: list[int]) -> tuple[list[int], bool]:
    match = cache.match(PrefixChain(""), tokens, len(tokens) // SIZE)
    return match.block_ids, match.next_is_coming


def test_what_this_plan_computes_is_announced_but_not_found_yet(cache):
    tokens, chain = [1, 2, 3, 4], PrefixChain("")
    cache.announce(chain, tokens, 2)
    assert look(cache, [1, 2, 3, 4]) == ([], True)
    assert look(cache, [1, 2, 9, 9]) == ([], True)
    assert look(cache, [1, 9, 3, 4]) == ([], False)
    assert look(cache, [1]) == ([], False)
    cache.publish(chain, tokens, [10, 11], 2)
    cache.begin_plan()
    assert look(cache, [1, 2, 3, 4]) == ([10, 11], False)
    assert look(cache, [1, 2, 9, 9]) == ([10], False)


def test_only_what_cannot_be_found_yet_is_announced(cache):
    publish(cache, [1, 2, 3, 4], [10, 11])
    cache.announce(PrefixChain(""), [1, 2, 3, 4], 2)  # it computes for itself what others find
    assert look(cache, [1, 2, 3, 4]) == ([10, 11], False)
    assert look(cache, [1, 2, 9, 9]) == ([10], False)
    cache.announce(PrefixChain(""), [1, 2, 3, 4, 5, 6, 7, 8], 4)
    assert look(cache, [1, 2, 3, 4, 5, 6]) == ([10, 11], True)
    assert look(cache, [1, 2, 9, 9]) == ([10], False)


def test_what_a_plan_does_not_complete_is_not_announced(cache):
    chain = PrefixChain("")
    cache.announce(chain, [1, 2, 3, 4], 1)
    cache.publish(chain, [1, 2, 3, 4], [10, 11], 1)
    cache.begin_plan()
    cache.announce(chain, [1, 2, 3, 4], 1)
    assert look(cache, [1, 2, 3, 4]) == ([10], False)
    cache.announce(chain, [1, 2, 3, 4], 2)
    assert look(cache, [1, 2, 3, 4]) == ([10], True)


def test_an_announcement_is_for_one_plan(cache):
    cache.announce(PrefixChain(""), [1, 2], 1)
    cache.begin_plan()
    assert look(cache, [1, 2]) == ([], False)


def test_without_a_cache_nothing_is_announced():
    cache = PrefixCache(SIZE, enabled=False)
    cache.announce(PrefixChain(""), [1, 2], 1)
    assert look(cache, [1, 2]) == ([], False)


def test_a_new_prompt_is_hashed_no_further_than_it_takes_to_see_that():
    hashed: list[bytes] = []

    def digest(data: bytes) -> bytes:
        hashed.append(data)
        return secret(data)

    secret = secret_digest()
    cache = PrefixCache(SIZE, digest=digest)
    chain = PrefixChain("")
    assert cache.match(chain, range(100), 50).block_ids == []
    cache.announce(chain, range(100), 50)
    assert len(hashed) == 2  # the salt and the first block
    cache.publish(chain, range(100), range(50), 50)
    assert len(hashed) == 51
    assert find(cache, [*range(20), 1, 1, *range(200)]) == [*range(10)]
    assert len(hashed) == 51 + 1 + 16


def test_a_chain_can_be_published_bit_by_bit(cache):
    tokens = [1, 2, 3]
    chain = PrefixChain("")
    cache.publish(chain, tokens, [10, 11], 1)
    tokens += [4, 5]
    cache.publish(chain, tokens, [10, 11, 12], 2)
    assert find(cache, [1, 2, 3, 4]) == [10, 11]
    assert cache.block_ids == {10, 11}


def test_the_second_copy_of_a_block_stays_private(cache):
    publish(cache, [1, 2, 3, 4], [10, 11])
    assert publish(cache, [1, 2, 5, 6], [20, 21]) == []
    assert cache.block_ids == {10, 11, 21}
    assert find(cache, [1, 2, 5, 6]) == [10, 21]


def test_a_forgotten_block_hides_what_hung_on_it(cache):
    publish(cache, [1, 2, 3, 4], [10, 11])
    cache.forget(10)
    assert find(cache, [1, 2, 3, 4]) == []
    publish(cache, [1, 2, 9, 9], [20, 21])
    assert find(cache, [1, 2, 3, 4]) == [20]  # block 11 hangs on another 10, and is not trusted
    assert publish(cache, [1, 2, 3, 4], [30, 31]) == [11]
    assert find(cache, [1, 2, 3, 4]) == [20, 31]
    cache.check_invariants()


def test_colliding_keys_never_confuse_tokens():
    cache = PrefixCache(SIZE, digest=same_key)
    publish(cache, [1, 2], [10])
    assert find(cache, [3, 4]) == []
    assert publish(cache, [3, 4], [20]) == [10]
    assert find(cache, [1, 2]) == []
    assert find(cache, [3, 4]) == [20]
    cache.check_invariants()


def test_colliding_keys_never_confuse_beginnings():
    # Only the second block's key is at fault: both prompts continue with the same tokens after different ones.
    cache = PrefixCache(SIZE, digest=lambda data: b"second" if data.endswith(b"\x07\0\0\0") else data)
    publish(cache, [1, 2, 7, 7], [10, 11])
    publish(cache, [3, 4], [20])
    assert find(cache, [3, 4, 7, 7]) == [20]


def test_colliding_keys_never_confuse_salts():
    cache = PrefixCache(SIZE, digest=same_key)
    publish(cache, [1, 2], [10], salt="tenant a")
    assert find(cache, [1, 2], salt="tenant b") == []


def test_the_hash_differs_from_process_to_process():
    assert secret_digest()(b"tokens") != secret_digest()(b"tokens")
    digest = secret_digest()
    assert digest(b"tokens") == digest(b"tokens")
    assert len(digest(b"tokens")) == 16
