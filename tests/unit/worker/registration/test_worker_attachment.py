"""An attachment whose stream breaks in awkward ways ends with a typed error, so that its owner tries again."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from services.common.base.errors import ErrorKind
from services.worker.contract.engine import Load
from services.worker.kv_events.event_log import KvEventLog
from services.worker.registration import attachment as attach
from services.worker.registration.address import default_worker_id
from services.worker.registration.attachment import Attachment
from services.worker.registration.container import container_name
from sluice.v1 import router_pb2
from tests.support.oracles.errors import raises_error


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
    with raises_error(kind=kind):
        async with asyncio.timeout(10):
            await attachment.run()
    assert call.cancelled


async def test_a_router_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "ATTACH_S", 0.05)
    call: Any = BrokenCall(stuck)
    call._answers.clear()
    attachment = Attachment(call, router_pb2.Registration(), [], lambda: [Load()], lambda: None)
    with raises_error(kind=ErrorKind.RESPONSE_TIMEOUT):
        async with asyncio.timeout(10):
            await attachment.run()


class DeafCall(BrokenCall):
    """Of a router that dies in the moment of the goodbye."""

    def __init__(self) -> None:
        super().__init__(nothing)

    def done(self) -> bool:
        return False

    async def done_writing(self) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch: 8")


async def nothing() -> None:
    return None


async def test_detach_without_a_router_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "LEAVE_S", 0.05)
    call: Any = DeafCall()
    attachment = Attachment(call, router_pb2.Registration(), [], lambda: [Load()], lambda: None)
    attachment.leave("shutdown")
    async with asyncio.timeout(10):
        await attachment.run()
    assert call.written[-1].leave.reason == "shutdown"
    assert call.cancelled


Reply = Callable[[bytes], bytes]
LOCAL = b"\x011\x010\x010\x03127\x07in-addr\x04arpa\0"


def named(*labels: str) -> Reply:
    """The answer of a name server that has this name for every address."""

    def reply(query: bytes) -> bytes:
        name = b"".join(bytes([len(label)]) + label.encode() for label in labels) + b"\0"
        header = query[:2] + struct.pack(">5H", 0x8180, 1, 1, 0, 0)
        return header + query[12:] + b"\xc0\x0c" + struct.pack(">HHIH", 12, 1, 600, len(name)) + name

    return reply


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Reply], tuple[str, int]]]:
    monkeypatch.setattr(socket, "gethostname", lambda: "3f2a9c8b7d6e")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    open_sockets: list[socket.socket] = []

    def begin(reply: Reply) -> tuple[str, int]:
        listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        listening.bind(("127.0.0.1", 0))
        open_sockets.append(listening)

        def answer() -> None:
            query, caller = listening.recvfrom(512)
            assert query[12:] == LOCAL + struct.pack(">2H", 12, 1)
            listening.sendto(reply(query), caller)

        threading.Thread(target=answer, daemon=True).start()
        place: tuple[str, int] = listening.getsockname()
        return place

    yield begin
    for one in open_sockets:
        one.close()


def test_name_of_the_container_comes_from_the_networks_name_server(
    server: Callable[[Reply], tuple[str, int]],
) -> None:
    assert container_name(server(named("sluice-worker-1", "sluice_default"))) == "sluice-worker-1"


@pytest.mark.parametrize(
    "reply",
    [
        lambda query: b"",
        lambda query: query,
        lambda query: named("other")(b"\0\0" + query[2:]) if query[:2] != b"\0\0" else b"",
        lambda query: query[:2] + struct.pack(">5H", 0x8183, 1, 0, 0, 0) + query[12:],
        lambda query: named("sluice-worker-1")(query)[:-20],
        lambda query: named("\x1b[31m")(query),
    ],
)
def test_answer_without_a_usable_name_leaves_the_name_empty(
    reply: Reply, server: Callable[[Reply], tuple[str, int]]
) -> None:
    assert container_name(server(reply)) == ""


def test_absent_name_server_leaves_the_name_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind(("127.0.0.1", 0))
        place = closed.getsockname()
    assert container_name(place) == ""


@pytest.mark.parametrize(
    ("host", "name", "worker_id"),
    [
        ("3f2a9c8b7d6e", "sluice-worker-2", "sluice-worker-2-50051"),
        ("3f2a9c8b7d6e", "", "3f2a9c8b7d6e-50051"),
        ("gpu-node-7", "never-asked", "gpu-node-7-50051"),
    ],
)
def test_default_worker_id_is_readable(host: str, name: str, worker_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert default_worker_id(50051, lambda: name) == worker_id
