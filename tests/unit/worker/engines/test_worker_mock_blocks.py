"""The block pool: references, reuse, eviction order, and events that replay to the truth."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.worker.contract.cache_events import CacheCleared, KvEvent
from services.worker.engines.mock.blocks import BlockPool
from tests.support.fakes.engines import replay


def filled(pool: BlockPool, hashes: Iterable[int]) -> list[int]:
    """A sequence that holds one stored block per hash."""
    blocks = []
    for block_hash in hashes:
        blocks += pool.allocate(1)
        pool.store(blocks[-1:], [block_hash])
    return blocks


def hashes_of(events: Iterable[KvEvent]) -> list[list[int]]:
    """The hashes of each event, none of which clears the cache."""
    found = []
    for event in events:
        assert not isinstance(event, CacheCleared)
        found.append(list(event.hashes))
    return found


def test_a_released_prefix_is_found_again() -> None:
    pool = BlockPool(4)
    blocks = filled(pool, [1, 2])
    pool.release(blocks)
    assert pool.used == 0
    assert pool.cached == 2
    assert pool.find_prefix([1, 2, 3], limit=3) == blocks
    assert pool.find_prefix([1, 2, 3], limit=1) == blocks[:1]
    assert pool.find_prefix([2], limit=1) == blocks[1:]


def test_the_end_of_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(4)
    pool.release(filled(pool, [1, 2]))
    pool.release(filled(pool, [3, 4]))
    pool.take_events()
    pool.allocate(1)
    assert hashes_of(pool.take_events()) == [[2]]
    pool.allocate(1)
    assert hashes_of(pool.take_events()) == [[1]]
    assert pool.cached_hashes() == {3, 4}


def test_touching_a_prefix_saves_it_from_eviction() -> None:
    pool = BlockPool(2)
    pool.release(filled(pool, [1]))
    pool.release(filled(pool, [2]))
    prefix = pool.find_prefix([1], limit=1)
    pool.hold(prefix)
    pool.release(prefix)
    pool.allocate(1)
    assert pool.cached_hashes() == {1}


def test_exhausted_pool_raises() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    with pytest.raises(IndexError):
        pool.allocate(1)


class PoolMachine(RuleBasedStateMachine):
    """Random use of a small pool against a model that counts."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.sequences: list[list[int]] = []
        self.present: set[int] = set()

    @rule(target=held, prompt=st.lists(st.integers(0, 3), min_size=1, max_size=5))
    def start(self, prompt: list[int]) -> list[int]:
        hashes = [hash(tuple(prompt[: index + 1])) & 0xFFFF_FFFF for index in range(len(prompt))]
        prefix = self.pool.find_prefix(hashes, len(hashes) - 1)
        fresh = len(hashes) - len(prefix)
        if not self.pool.can_hold(prefix, fresh):
            return []
        self.pool.hold(prefix)
        blocks = prefix + self.pool.allocate(fresh)
        self.pool.store(blocks, hashes)
        self.sequences.append(blocks)
        return blocks

    @rule(blocks=consumes(held))
    def end(self, blocks: list[int]) -> None:
        if blocks:
            self.sequences.remove(blocks)
            self.pool.release(blocks)

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @invariant()
    def blocks_in_use_are_those_that_sequences_hold(self) -> None:
        assert self.pool.used == len({block for blocks in self.sequences for block in blocks})
        assert self.pool.available == self.pool.total - self.pool.used

    @invariant()
    def replayed_events_are_the_cache(self) -> None:
        replay(self.pool.take_events(), self.present)
        assert self.present == self.pool.cached_hashes()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
