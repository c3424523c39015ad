"""Budgets refuse what is over their limit, count it and name their setting; pools serve waiting shares in order."""

from __future__ import annotations

import asyncio

import pytest

from services.common.base import budgets
from services.common.base.budgets import TENANT_CODE, Budget, BudgetPool, TenantPool
from services.common.base.errors import ErrorKind
from tests.support.oracles.errors import raises_error


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(budgets, "on_refused", names.append)
    return names


def test_budget_amount_at_limit_passes(refused: list[str]) -> None:
    Budget("schema_nodes", 3, "--max-schema-nodes").check(3, "The nodes")
    assert refused == []


def test_budget_amount_above_limit_raises_and_counts(refused: list[str]) -> None:
    with raises_error(match="--max-schema-nodes", kind=ErrorKind.INVALID_ARGUMENT, param="tools", code=budgets.CODE):
        Budget("schema_nodes", 3, "--max-schema-nodes").check(4, "The nodes", param="tools")
    assert refused == ["schema_nodes"]


def test_budget_undeclared_name_raises() -> None:
    with pytest.raises(ValueError, match="not a declared budget"):
        Budget("everything", 1, "--max-everything")


async def test_budget_pool_full_grants_waiting_shares_in_order() -> None:
    pool = BudgetPool("body_bytes", 10, "--max-body-mb")
    await pool.take(8)
    order: list[int] = []

    async def wait(amount: int) -> None:
        await pool.take(amount)
        order.append(amount)

    tasks = [asyncio.create_task(wait(amount)) for amount in (9, 1)]
    await asyncio.sleep(0)
    assert not pool.try_take(1), "a share that would fit must not overtake those that wait"
    pool.give_back(8)
    await asyncio.gather(*tasks)
    assert order == [9, 1]
    assert pool.used == 10


async def test_budget_pool_cancelled_wait_lets_the_next_share_through() -> None:
    pool = BudgetPool("body_bytes", 10, "--max-body-mb")
    await pool.take(8)
    large, small = asyncio.create_task(pool.take(9)), asyncio.create_task(pool.take(2))
    await asyncio.sleep(0)
    large.cancel()
    await small
    assert pool.used == 10


async def test_budget_pool_cancelled_in_the_moment_of_the_grant_gives_the_share_back() -> None:
    pool = BudgetPool("body_bytes", 10, "--max-body-mb")
    await pool.take(10)
    waiting = asyncio.create_task(pool.take(4))
    await asyncio.sleep(0)
    pool.give_back(10)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert pool.used == 0


async def test_budget_pool_share_grows_ahead_of_those_that_wait() -> None:
    pool = BudgetPool("body_bytes", 10, "--max-body-mb")
    await pool.take(6)
    waiting = asyncio.create_task(pool.take(9))
    await asyncio.sleep(0)
    assert not pool.try_take(4)
    assert not pool.try_grow(5)
    assert pool.try_grow(4)
    pool.give_back(10)
    await waiting
    assert pool.used == 9


async def test_budget_pool_missing_is_what_the_first_waiting_share_lacks() -> None:
    pool = BudgetPool("body_bytes", 10, "--max-body-mb")
    assert pool.missing == 0
    await pool.take(8)
    waiting = [asyncio.create_task(pool.take(amount)) for amount in (5, 9)]
    await asyncio.sleep(0)
    assert pool.missing == 3
    pool.give_back(2)
    assert pool.missing == 1
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert pool.missing == 0


def test_budget_excess_without_an_error_is_counted(refused: list[str]) -> None:
    Budget("pipelined_requests", 4, "--max-pipelined-requests").count()
    assert refused == ["pipelined_requests"]


def test_tenant_pool_refuses_a_tenant_or_all_and_takes_shares_back(refused: list[str]) -> None:
    pool = TenantPool("sockets", 3, "--max-websockets", 2, "--max-websockets-per-tenant")
    pool.take("a", 2, "The sockets")
    with raises_error(match="--max-websockets-per-tenant", kind=ErrorKind.OVERLOADED, code=TENANT_CODE):
        pool.take("a", 1, "The sockets")
    pool.take("b", 1, "The sockets")
    with raises_error(match="--max-websockets\\)", kind=ErrorKind.OVERLOADED, code=budgets.CODE):
        pool.take("c", 1, "The sockets")
    assert refused == ["sockets", "sockets"]
    pool.give_back("a", 2)
    pool.give_back("b", 1)
    pool.take("a", 1, "The sockets")
    assert pool.used == 1
