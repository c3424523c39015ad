"""A session without a network: slots, rows, errors that stay with their slot, and a bound on what is pending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from services.worker.contract.generation import Delta
from services.worker.serving import outbox
from services.worker.serving.outbox import PAGE_TOKENS, Outbox, Page
from services.worker.serving.session import WorkerSession
from services.worker.serving.worker import Worker
from tests.support.fakes.engines import ScriptedEngine, request


async def opened(engine: ScriptedEngine) -> tuple[Worker, WorkerSession]:
    worker = Worker(engine, "w")
    await worker.start()
    return worker, WorkerSession(worker, lambda: None, lambda: None)


def pages(session: WorkerSession) -> list[Page]:
    taken = []
    while (page := session.take()) is not None:
        taken.append(page)
    return taken


def rows(page: Page) -> Iterator[tuple[int, list[int]]]:
    start = 0
    for slot, count in zip(page.slots, page.counts, strict=True):
        yield slot, list(page.token_ids[start : start + count])
        start += count
    assert start == len(page.token_ids)


async def settle(worker: Worker) -> None:
    async with asyncio.timeout(30):
        await worker.engine.drain()


async def test_invalid_id_ends_only_its_slot() -> None:
    worker, session = await opened(ScriptedEngine([Delta((5,)), Delta((-1,)), Delta((6,))]))
    session.start(3, request("a"))
    await settle(worker)
    (page,) = pages(session)
    assert list(rows(page)) == [(3, [5])], "rows that do not fit their ids would end the session"
    assert page.extras[-1][1].error is not None


async def test_close_aborts_all_requests_and_sends_nothing() -> None:
    engine = ScriptedEngine(hold=True)
    worker, session = await opened(engine)
    for slot in range(3):
        session.start(slot, request(f"r{slot}"))
    await asyncio.sleep(0)
    session.close()
    await settle(worker)
    assert sorted(engine.closed) == ["r0", "r1", "r2"]
    assert worker.live_requests == 0
    assert pages(session) == []


def fill(box: Outbox, tokens: int) -> None:
    for _ in range(tokens // PAGE_TOKENS):
        box.page.token_ids.extend(range(PAGE_TOKENS))
        box.ready()


def test_messages_are_cut_to_a_size_that_fits() -> None:
    box = Outbox(lambda: None, lambda: None)
    fill(box, 3 * PAGE_TOKENS)
    sizes = []
    while (page := box.take()) is not None:
        sizes.append(len(page.token_ids))
    assert sizes == [PAGE_TOKENS] * 3
    assert not box.pending_tokens


def test_a_caller_that_stopped_reading_is_given_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    given_up: list[int] = []
    box = Outbox(lambda: None, lambda: given_up.append(1))
    fill(box, outbox.STALLED_TOKENS)
    assert not given_up  # a burst to a caller that may still be reading
    clock[0] += outbox.STALLED_AFTER_S + 1
    fill(box, PAGE_TOKENS)
    fill(box, PAGE_TOKENS)
    assert given_up == [1]


def test_no_caller_is_waited_for_without_limit() -> None:
    given_up: list[int] = []
    box = Outbox(lambda: None, lambda: given_up.append(1))
    fill(box, outbox.MAX_TOKENS)
    assert given_up == [1]


async def test_tokens_that_follow_each_other_in_a_slot_are_one_row() -> None:
    worker, session = await opened(ScriptedEngine([Delta((5,)), Delta((6,)), Delta((7, 8)), Delta((9,))]))
    session.start(3, request("a"))
    await settle(worker)
    (page,) = pages(session)
    assert list(rows(page)) == [(3, [5, 6]), (3, [7, 8, 9])]


def test_a_caller_is_woken_once_for_each_message() -> None:
    woken: list[int] = []
    box = Outbox(lambda: woken.append(1), lambda: None)
    fill(box, 3 * PAGE_TOKENS)
    assert woken == [1]
    assert box.take() is not None
    box.ready()
    box.ready()
    assert woken == [1, 1]
