"""An attachment whose stream breaks in awkward ways ends with a typed error, so that its owner tries again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from grpc._cython import cygrpc

from services.common.errors import ErrorKind, SluiceError
from services.worker.contract.engine import Load
from services.worker.kv_events.event_log import KvEventLog
from services.worker.registration import attachment as attach
from services.worker.registration.attachment import Attachment
from sluice.v1 import router_pb2


class BrokenCall:
    """Accepts the registration, then does what it is told."""

    def __init__(self, after: Callable[[], Any]) -> None:
        self._after = after
        self._answers = [router_pb2.AttachResponse(attached=router_pb2.Attached())]
        self.written: list[router_pb2.AttachRequest] = []
        self.cancelled = False

    async def write(self, message: router_pb2.AttachRequest) -> None:
        if self.written:
            await self._after()
        self.written.append(message)

    async def read(self) -> router_pb2.AttachResponse:
        if self._answers:
            return self._answers.pop()
        return await asyncio.Event().wait()  # type: ignore[return-value]

    def cancel(self) -> None:
        self.cancelled = True


async def finished() -> None:
    raise asyncio.InvalidStateError("RPC already finished.")


async def stuck() -> None:
    await asyncio.Event().wait()


async def cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        (finished, ErrorKind.DISCONNECTED),
        (stuck, ErrorKind.RESPONSE_TIMEOUT),
        (cancelled, ErrorKind.DISCONNECTED),
    ],
)
async def test_a_lost_stream_is_a_typed_error(
    after: Callable[[], Any], kind: ErrorKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "ATTACH_S", 0.05 if after is stuck else 5.0)
    call: Any = BrokenCall(after)
    attachment = Attachment(call, router_pb2.Registration(), [KvEventLog(0)], lambda: [Load()], lambda: None)
    with pytest.raises(SluiceError) as lost:
        async with asyncio.timeout(10):
            await attachment.run()
    assert lost.value.kind is kind
    assert call.cancelled


async def test_a_router_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "ATTACH_S", 0.05)
    call: Any = BrokenCall(stuck)
    call._answers.clear()
    attachment = Attachment(call, router_pb2.Registration(), [], lambda: [Load()], lambda: None)
    with pytest.raises(SluiceError) as lost:
        async with asyncio.timeout(10):
            await attachment.run()
    assert lost.value.kind is ErrorKind.RESPONSE_TIMEOUT


class DeafCall(BrokenCall):
    """Of a router that dies in the moment of the goodbye."""

    def __init__(self) -> None:
        super().__init__(nothing)

    def done(self) -> bool:
        return False

    async def done_writing(self) -> None:
        raise cygrpc.InternalError("Failed grpc_call_start_batch: 8")


async def nothing() -> None:
    return None


async def test_a_goodbye_that_nobody_hears_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "LEAVE_S", 0.05)
    call: Any = DeafCall()
    attachment = Attachment(call, router_pb2.Registration(), [], lambda: [Load()], lambda: None)
    attachment.leave("shutdown")
    async with asyncio.timeout(10):
        await attachment.run()
    assert call.written[-1].leave.reason == "shutdown"
    assert call.cancelled
