"""The prefix cache against a plain model of it: a map from prefixes to what they hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from everroll.engines.embedded.prefix_cache import PrefixCache

BLOCK = 4


def fill(cache: PrefixCache, store: dict[int, tuple[int, ...]], tokens: list[int], num_tokens: int) -> None:
    """Insert, and remember in `store` the whole prefix that each filled block stands for."""
    for index, number in cache.insert(tokens, num_tokens):
        store[number] = tuple(tokens[: (index + 1) * BLOCK])


def test_finds_the_longest_prefix_in_whole_blocks() -> None:
    cache, store = PrefixCache(8, BLOCK), {}
    fill(cache, store, list(range(11)), 11)
    assert len(cache) == 2
    match = cache.match([*range(8), 99, 98, 97, 96], 12)
    assert [store[number] for number in match.blocks] == [tuple(range(4)), tuple(range(8))]
    assert match.missing_key is not None
    assert cache.match(list(range(8)), 7).blocks == match.blocks[:1]
    assert cache.match(list(range(8)), 8).missing_key is None


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    cache, store = PrefixCache(8, BLOCK), {}
    fill(cache, store, [1] * 4 + [7] * 4, 8)
    assert cache.match([2] * 4 + [7] * 4, 8).blocks == []
    assert cache.match([7] * 4, 4).blocks == []


def test_inserting_again_fills_nothing() -> None:
    cache = PrefixCache(8, BLOCK)
    assert len(cache.insert(list(range(8)), 8)) == 2
    assert cache.insert(list(range(8)), 8) == []


def test_evicts_the_least_recently_used_chain_from_its_tail() -> None:
    cache, store = PrefixCache(4, BLOCK), {}
    old, new = list(range(8)), list(range(100, 108))
    fill(cache, store, old, 8)
    fill(cache, store, new, 8)
    cache.match(old, 8)
    fill(cache, store, [50] * 4, 4)
    assert len(cache.match(new, 8).blocks) == 1
    assert len(cache.match(old, 8).blocks) == 2


def test_a_chain_longer_than_the_cache_keeps_its_beginning() -> None:
    cache, store = PrefixCache(2, BLOCK), {}
    fill(cache, store, list(range(40)), 40)
    assert [store[number] for number in cache.match(list(range(40)), 40).blocks] == [tuple(range(4)), tuple(range(8))]


def test_clear_frees_every_block() -> None:
    cache = PrefixCache(3, BLOCK)
    cache.insert(list(range(12)), 12)
    cache.clear()
    assert cache.match(list(range(12)), 12).blocks == []
    assert len(cache.insert(list(range(50, 62)), 12)) == 3


def test_without_blocks_nothing_is_kept() -> None:
    cache = PrefixCache(0, BLOCK)
    assert cache.insert(list(range(12)), 12) == []
    assert cache.match(list(range(12)), 12).blocks == []


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.lists(st.lists(st.integers(0, 1), max_size=20), max_size=25))
def test_whatever_is_inserted_matches_are_true_prefixes(num_blocks: int, prompts: list[list[int]]) -> None:
    cache, store = PrefixCache(num_blocks, BLOCK), {}
    for tokens in prompts:
        match = cache.match(tokens, len(tokens))
        for index, number in enumerate(match.blocks):
            assert store[number] == tuple(tokens[: (index + 1) * BLOCK])
        fill(cache, store, tokens, len(tokens))
        held = cache.match(tokens, len(tokens)).blocks
        assert len(held) == min(num_blocks, len(tokens) // BLOCK)
        assert len(cache) <= num_blocks
