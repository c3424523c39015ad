"""Answers of operations, delivered without HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.common.base.errors import SluiceError, unavailable
from services.gateway.apis.openai.choices import StreamedChoices
from services.gateway.apis.openai.completion_objects import ChatFormat
from services.gateway.core.request import Finish, FinishReason
from services.gateway.operations.operation import Caller, Whole, never_gone
from services.gateway.operations.output import ReadyEvents
from services.gateway.operations.registry import Operations
from services.gateway.operations.waiting import events_of
from tests.support.waiting import settle

STOP = Finish(FinishReason.STOP, completion_tokens=1)


def chat() -> StreamedChoices:
    return StreamedChoices(ChatFormat("chatcmpl-1", 1, "m", False), 1, False, lambda error: error)


async def collected(source: Any, gone: Any = never_gone) -> bytes:
    return b"".join([events async for events in events_of(source, gone)])


async def test_events_of_a_source_that_ended_before_it_was_attached_are_all_there() -> None:
    choices = chat()
    choices.sinks[0].text("early")
    choices.sinks[0].finish(STOP)
    events = await asyncio.wait_for(collected(choices), 5)
    assert b"early" in events
    assert events.endswith(b"data: [DONE]\n\n")


async def test_events_of_a_source_arrive_while_it_runs() -> None:
    choices = chat()
    reading = asyncio.create_task(collected(choices))
    for piece in ("a", "b", "c"):
        await settle()
        choices.sinks[0].text(piece)
    choices.sinks[0].finish(STOP)
    events = await asyncio.wait_for(reading, 5)
    assert [events.count(b'"content":"%b"' % piece) for piece in (b"a", b"b", b"c")] == [1, 1, 1]


async def test_events_of_a_source_that_fails_before_its_first_event_raise() -> None:
    choices = chat()
    choices.sinks[0].fail(unavailable("no worker"))
    with pytest.raises(SluiceError, match="no worker"):
        await asyncio.wait_for(collected(choices), 5)


async def test_events_of_a_source_whose_caller_goes_end_and_cancel_it() -> None:
    cancelled, gone = asyncio.Event(), asyncio.Event()

    class Source(ReadyEvents):
        over = False

        def cancel(self) -> None:
            cancelled.set()

    async def wait() -> None:
        await gone.wait()

    reading = asyncio.create_task(collected(Source(b"x"), wait))
    await settle()
    gone.set()
    assert await asyncio.wait_for(reading, 5) == b"x"
    assert cancelled.is_set()


async def test_operation_of_an_unknown_path_is_not_found() -> None:
    operations = Operations()

    async def answer(body: dict[str, Any], caller: Caller) -> Whole:
        return Whole(body)

    operations.add("/x", answer)
    assert await operations.of("/x")({"a": 1}, Caller({})) == Whole({"a": 1})
    with pytest.raises(SluiceError, match="/y"):
        operations.of("/y")
