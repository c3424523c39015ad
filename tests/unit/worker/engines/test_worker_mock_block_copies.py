"""The mock's cache keeps equal blocks apart, as vLLM's does."""

from __future__ import annotations

from array import array

from services.worker.contract.cache_events import BlocksRemoved, BlocksStored
from services.worker.engines.mock.blocks import BlockPool

HASH = 7


def two_copies() -> BlockPool:
    """Of four blocks, two hold the same content and are idle."""
    pool = BlockPool(4)
    for _ in range(2):
        block = pool.allocate()
        pool.store(block, HASH)
        pool.release([block])
    return pool


def test_the_second_copy_is_stored_without_a_word() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.store(first, HASH)
    pool.store(second, HASH)
    assert pool.take_events() == [BlocksStored(array("Q", [HASH]))]
    assert pool.find_prefix([HASH], 1) == [first]
    assert pool.cached == 1


def test_the_content_is_gone_with_its_last_copy() -> None:
    pool = BlockPool(2)
    blocks = [pool.allocate(), pool.allocate()]
    for block in blocks:
        pool.store(block, HASH)
    pool.release(blocks)
    pool.take_events()
    pool.allocate()
    assert pool.take_events() == []
    assert pool.find_prefix([HASH], 1) != []
    pool.allocate()
    assert pool.take_events() == [BlocksRemoved(array("Q", [HASH]))]
    assert pool.find_prefix([HASH], 1) == []


def test_clearing_forgets_every_copy() -> None:
    pool = two_copies()
    pool.clear()
    assert (pool.cached, pool.available, pool.find_prefix([HASH], 1)) == (0, 4, [])
    assert len({pool.allocate() for _ in range(4)}) == 4
