"""The library's ledger of blocks, watched: what it registers and forgets is told under the hashes all services use."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from services.common.types.hashing import block_hashes, seed_for
from services.worker.contract.cache_events import BlocksRemoved, BlocksStored
from services.worker.engines.transformers.block_hasher import BlockHasher, forget_hashes, record_changes
from services.worker.engines.transformers.step import CacheChanges
from tests.support.fakes.engines import replay


class RequestHistory:
    """Behaves as the library's BlockLedger does."""

    def __init__(self) -> None:
        self.shared_ref_counts: dict[int, int] = {}
        self.hash_to_block: dict[int, int] = {}
        self.block_to_hash: dict[int, int] = {}
        self.cached_blocks: dict[int, None] = {}

    def register_new_hash(self, block_id: int, block_hash: int) -> int | None:
        if block_hash in self.hash_to_block:
            return self.hash_to_block[block_hash]
        self.hash_to_block[block_hash] = block_id
        self.block_to_hash[block_id] = block_hash
        return None

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        if block_id in self.block_to_hash:
            if not no_cache:
                self.cached_blocks[block_id] = None
                return False
            self.hash_to_block.pop(self.block_to_hash.pop(block_id))
        return True

    def evict_cached_blocks(self) -> list[int]:
        evicted = list(self.cached_blocks)
        self.cached_blocks.clear()
        for block_id in evicted:
            self.hash_to_block.pop(self.block_to_hash.pop(block_id))
        return evicted


def test_blocks_have_the_names_that_all_services_agree_on() -> None:
    names = BlockHasher()
    names.seed = seed_for("adapter", "salt")
    tokens = list(range(12))
    chained = []
    parent = None
    for start in (0, 4, 8):
        parent = names(parent, tokens[start : start + 4])
        chained.append(parent)
    assert chained == block_hashes(tokens, 4, "adapter", "salt").tolist()


Actions = st.lists(st.tuples(st.sampled_from(["register", "release", "drop", "evict", "forget"]), st.integers(0, 12)))


@given(Actions)
def test_events_replayed_are_what_the_ledger_holds(actions: list[tuple[str, int]]) -> None:
    ledger, news = RequestHistory(), CacheChanges()
    record_changes(ledger, news)
    present: set[int] = set()
    for action, number in actions:
        if action == "register" and number not in ledger.block_to_hash:
            ledger.register_new_hash(number, number % 7 + 100)
        elif action == "release" and number in ledger.block_to_hash:
            ledger.release(number)
        elif action == "drop" and number not in ledger.cached_blocks:
            ledger.release(number, no_cache=True)
        elif action == "evict":
            ledger.evict_cached_blocks()
        elif action == "forget":
            forget_hashes(ledger, news)
        replay(news.take(), present)
        assert present == set(ledger.hash_to_block)
    assert not news.take()


def test_news_of_one_kind_travel_together() -> None:
    news = CacheChanges()
    news.stored(1)
    news.stored(2)
    news.removed(1)
    news.stored(3)
    assert news.take() == [
        BlocksStored(array("Q", (1, 2))),
        BlocksRemoved(array("Q", (1,))),
        BlocksStored(array("Q", (3,))),
    ]
