"""What is kept of responses: bounded in number, bytes and time, and never shown to another key."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.gateway.apis.pagination import page
from services.gateway.apis.responses.store import PER_RESPONSE, MemoryStore, StoredResponse, StoreLimits
from tests.support.oracles.errors import raises_error

MOST, MAX_BYTES, MAX_S = 5, 20 * PER_RESPONSE, 10.0
OF_OWNER = (3, 12 * PER_RESPONSE)
OWNERS = st.sampled_from(["", "a", "b"])
IDS = st.sampled_from([f"resp_{index}" for index in range(8)])


T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine that waits for nothing answers."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        answer: T = end.value
        return answer
    raise AssertionError("it waits")


class Keeping(RuleBasedStateMachine):
    """The store against a plain dictionary of everything that was ever kept."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = MemoryStore(StoreLimits.of(MOST, MAX_BYTES, OF_OWNER), MAX_S, lambda: self.now)
        self.known: dict[tuple[str, str], tuple[float, StoredResponse]] = {}

    @rule(owner=OWNERS, response_id=IDS, size=st.integers(0, 24 * PER_RESPONSE))
    def keep(self, owner: str, response_id: str, size: int) -> None:
        kept = StoredResponse(b"x" * size, b"[]")
        self.store.put(owner, response_id, kept)
        self.known[owner, response_id] = (self.now, kept)
        found = at_once(self.store.find(owner, response_id))
        assert (found == kept) == (kept.size <= OF_OWNER[1])

    @rule(owner=OWNERS, response_id=IDS)
    def find(self, owner: str, response_id: str) -> None:
        found = at_once(self.store.find(owner, response_id))
        if found is not None:
            kept_at, kept = self.known[owner, response_id]
            assert found is kept
            assert self.now - kept_at < MAX_S

    @rule(owner=OWNERS, response_id=IDS)
    def drop(self, owner: str, response_id: str) -> None:
        was_there = at_once(self.store.find(owner, response_id)) is not None
        assert at_once(self.store.delete(owner, response_id)) == was_there
        assert at_once(self.store.find(owner, response_id)) is None

    @rule(seconds=st.floats(0.1, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def bounded(self) -> None:
        assert len(self.store) <= MOST
        assert 0 <= self.store.size <= MAX_BYTES
        assert (len(self.store) == 0) == (self.store.size == 0)
        for owner, of_owner in self.store._owners.items():
            assert 0 < len(of_owner) <= OF_OWNER[0]
            assert self.store._sizes[owner] <= OF_OWNER[1]


Keeping.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestKeeping = Keeping.TestCase


async def test_store_full_for_one_owner_evicts_only_that_owners_responses() -> None:
    store = MemoryStore(StoreLimits.of(10, 1 << 20), 60)
    store.put("quiet", "resp_q", StoredResponse(b"{}", b"[]"))
    for index in range(100):
        store.put("loud", f"resp_{index}", StoredResponse(b"{}", b"[]"))
    assert await store.find("quiet", "resp_q") is not None
    assert await store.find("loud", "resp_99") is not None
    assert await store.find("loud", "resp_0") is None
    assert await store.find("loud", "resp_q") is None


async def test_a_tenant_at_its_bound_takes_nothing_from_one_that_keeps_more_bytes() -> None:
    store = MemoryStore(StoreLimits.of(10, 30 * PER_RESPONSE, (4, 16 * PER_RESPONSE)), 60)
    large = StoredResponse(b"x" * (3 * PER_RESPONSE - 2), b"[]")  # 4 * PER_RESPONSE with what keeping costs
    for index in range(5):
        store.put("other", f"resp_{index}", large)
    for index in range(100):
        store.put("loud", f"resp_{index}", StoredResponse(b"{}", b"[]"))
    assert [await store.find("other", f"resp_{index}") is not None for index in range(5)] == [False, *[True] * 4]
    assert [await store.find("loud", f"resp_{index}") is not None for index in (95, 96, 99)] == [False, True, True]


async def test_store_full_with_equal_owners_evicts_from_the_one_that_adds() -> None:
    store = MemoryStore(StoreLimits.of(4, 1 << 20), 60)
    for owner, name in (("a", "resp_1"), ("a", "resp_2"), ("b", "resp_3"), ("b", "resp_4"), ("b", "resp_5")):
        store.put(owner, name, StoredResponse(b"{}", b"[]"))
    assert await store.find("a", "resp_1") is not None
    assert await store.find("b", "resp_3") is None


async def test_nothing_is_kept_where_nothing_shall_be() -> None:
    store = MemoryStore(StoreLimits.of(0, 1 << 20), 60)
    store.put("a", "resp_1", StoredResponse(b"{}", b"[]"))
    assert await store.find("a", "resp_1") is None
    assert store.size == 0


ITEMS: list[dict[str, Any]] = [{"id": f"msg_{index}"} for index in range(7)]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_come_to_all_items(order: str, limit: int) -> None:
    query = {"order": order, "limit": str(limit)}
    seen: list[dict[str, Any]] = []
    for _ in range(20):
        shown = page(ITEMS, query)
        seen += shown["data"]
        assert (shown["first_id"], shown["last_id"]) == (shown["data"][0]["id"], shown["data"][-1]["id"])
        if not shown["has_more"]:
            break
        query["after"] = shown["last_id"]
    assert seen == (ITEMS if order == "asc" else ITEMS[::-1])


@pytest.mark.parametrize(
    ("field", "value"),
    [("limit", "0"), ("limit", "101"), ("limit", "x"), ("limit", "1e1"), ("order", "up"), ("after", "msg_9")],
)
def test_pages_that_cannot_be(field: str, value: str) -> None:
    with raises_error(param=field):
        page(ITEMS, {field: value})
