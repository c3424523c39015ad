"""The caller's side of unary calls that share one stream; `call_server` is the server's side.

A unary call costs gRPC about 250 µs of CPU in both processes whatever it carries, a call on a session a tenth of that,
and calls that are ready together share a message. A `MultiplexedCall`, and what its `beside` returns, is called, and
fails, like the unary method.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import count
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from services.common.base.packing import pack_u32
from services.common.base.shared_steps import shared_step
from services.common.rpc.errors import DETAIL_KEY, from_detail, status_of
from services.common.rpc.session import ClientSession
from sluice.v1 import preprocess_pb2, preprocess_pb2_grpc, router_pb2, router_pb2_grpc

MAX_BYTES = 1 << 20
"""Bytes of a request that shares a stream with others: larger ones use calls of their own."""
BYTES_PER_MESSAGE = 4 << 20
RETRY_S = 0.1

log = logging.getLogger(__name__)

Q = TypeVar("Q", bound=Message)
A = TypeVar("A")
B = TypeVar("B")


class MultiplexedCall(Generic[Q, A]):
    """One unary RPC of one peer.

    `run` keeps a session open while the peer is `welcome`. Without a session, and with a peer that does not support
    sessions, every call is a unary one.

    Args:
        peer: the peer's name in messages.
        unary: the unary RPC.
        session: opens the stream.
        make_call: builds the message of one call, such as `TokenizeCall`.
        make_calls: builds the message of several calls.
        max_pause_s: as in `BatchWriter`.
    """

    def __init__(
        self,
        peer: str,
        unary: Callable[..., Awaitable[A]],
        session: Callable[[], grpc.aio.StreamStreamCall[Any, Any]],
        make_call: Callable[..., Any],
        make_calls: Callable[..., Any],
        max_pause_s: float = 0.0,
    ) -> None:
        self._peer = peer
        self._unary = unary
        self._open_session = session
        self._make_call = make_call
        self._make_calls = make_calls
        self._max_pause_s = max_pause_s
        self._numbers = count(1)
        self._pending: dict[int, tuple[asyncio.Future[Any], str]] = {}  # with the field of the response
        self._calls: list[Any] = []
        self._cancels: list[int] = []
        self._welcome = asyncio.Event()
        self._session: ClientSession[Any, Any] | None = None
        self._announced: Any = None  # the server's first message

    def __call__(
        self, request: Q, *, timeout: float, metadata: Sequence[tuple[str, str]] | None = None
    ) -> Coroutine[Any, Any, A]:
        """Makes one call; raises AioRpcError like the unary RPC.

        Args:
            timeout: seconds.
        """
        return self._call(self._unary, "request", "response", request, timeout, metadata)

    def beside(
        self, unary: Callable[..., Awaitable[B]], field: str, response: str, announced: str
    ) -> Callable[..., Awaitable[B]]:
        """Returns a further RPC of the peer, whose calls share the stream.

        Args:
            unary: the unary RPC.
            field: of the message of one call, for the request.
            response: field of the message of its response.
            announced: field of the peer's first message; the RPC is unary unless it is set.
        """

        def call(
            request: Message, *, timeout: float, metadata: Sequence[tuple[str, str]] | None = None
        ) -> Awaitable[B]:
            if self._announced is None or not getattr(self._announced, announced):
                return unary(request, timeout=timeout, metadata=metadata)
            return self._call(unary, field, response, request, timeout, metadata)

        return call

    async def _call(
        self,
        unary: Callable[..., Awaitable[B]],
        field: str,
        response: str,
        request: Message,
        timeout: float,
        metadata: Sequence[tuple[str, str]] | None,
    ) -> B:
        session = self._session
        usable = self._announced is not None and self._welcome.is_set() and request.ByteSize() <= MAX_BYTES
        if session is None or not usable:
            return await unary(request, timeout=timeout, metadata=metadata)
        loop = asyncio.get_running_loop()
        number = next(self._numbers) & 0xFFFFFFFF
        self._calls.append(self._make_call(number=number, metadata=dict(metadata or ()), **{field: request}))
        answer: asyncio.Future[B] = loop.create_future()
        self._pending[number] = answer, response
        session.wake()
        timer = loop.call_later(timeout, _fail, answer, grpc.StatusCode.DEADLINE_EXCEEDED)
        try:
            return await answer
        finally:
            timer.cancel()
            if self._pending.pop(number, None) is not None:  # no response arrived
                self._cancels.append(number)
                session.wake()
            self._close_if_done()
            del answer  # break the reference cycle: its exception's traceback references this frame

    @property
    def unary(self) -> Callable[..., Awaitable[A]]:
        """The unary RPC, for requests whose bytes would delay others on the stream."""
        return self._unary

    async def run(self) -> None:
        """Keeps a session open until cancelled."""
        while True:
            await self._welcome.wait()
            self._session = ClientSession(
                self._peer, self._open_session, self._drain, self._on_message, self._max_pause_s
            )
            try:
                await self._session.run()
            finally:
                announced, self._announced, self._session = self._announced, None, None
                self._fail_all()
            if announced is None:  # the peer does not support sessions, or disconnected
                self._welcome.clear()
            await asyncio.sleep(RETRY_S)

    def welcome(self, yes: bool) -> None:
        """Sets whether the peer takes calls; if not, the session ends with the last response."""
        if yes:
            self._welcome.set()
        else:
            self._welcome.clear()
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._session is not None and not self._pending and not self._welcome.is_set():
            self._session.close()

    def _drain(self) -> Any | None:
        if not self._calls and not self._cancels:
            return None
        count_taken, size = 0, 0
        while count_taken < len(self._calls) and size < BYTES_PER_MESSAGE:
            size += self._calls[count_taken].ByteSize()
            count_taken += 1
        calls, self._calls = self._calls[:count_taken], self._calls[count_taken:]
        cancels: list[int] = []
        if not self._calls:  # a cancellation must not overtake its call
            cancels, self._cancels = self._cancels, []
        return self._make_calls(calls=calls, cancels=pack_u32(cancels) if cancels else b"")

    @shared_step("calls.receive")
    def _on_message(self, message: Any | None) -> None:
        if message is None:  # gRPC could not parse it, and has logged the failure
            if self._session is not None:
                self._session.close()
            return
        if self._announced is None:
            self._announced = message
        for answer in message.answers:
            pending, response = self._pending.pop(answer.number, (None, ""))
            if pending is None or pending.done():
                continue
            try:
                _settle(pending, answer, response)
            except Exception:
                log.exception("the response to a call cannot be read", extra={"peer": self._peer})
                _fail(pending, grpc.StatusCode.INTERNAL)

    def _fail_all(self) -> None:
        pending, self._pending = self._pending, {}
        self._calls.clear()
        self._cancels.clear()
        for answer, _ in pending.values():
            _fail(answer, grpc.StatusCode.UNAVAILABLE)


def _settle(pending: asyncio.Future[Any], answer: Any, response: str) -> None:
    """Ends a call with its response, in the field of this name, or with the error that it contains."""
    if answer.HasField("error"):
        pending.set_exception(_typed(answer.error))
    else:
        pending.set_result(getattr(answer, response))


def _fail(answer: asyncio.Future[Any], code: grpc.StatusCode) -> None:
    if not answer.done():
        answer.set_exception(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata()))


def _typed(detail: Any) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata((DETAIL_KEY, detail.SerializeToString()))
    return grpc.aio.AioRpcError(status_of(from_detail(detail).kind), grpc.aio.Metadata(), trailing, detail.message)


def preprocess_stub(channel: grpc.aio.Channel, max_pause_s: float) -> preprocess_pb2_grpc.PreprocessAsyncStub:
    """Returns a stub that multiplexes its calls of Tokenize over one stream.

    Args:
        max_pause_s: as in `BatchWriter`.
    """
    stub: Any = preprocess_pb2_grpc.PreprocessStub(channel)
    calls = preprocess_pb2.TokenizeCall, preprocess_pb2.TokenizeCalls
    stub.Tokenize = MultiplexedCall("preprocess", stub.Tokenize, stub.Session, *calls, max_pause_s)
    typed: preprocess_pb2_grpc.PreprocessAsyncStub = stub
    return typed


def router_stub(channel: grpc.aio.Channel, max_pause_s: float) -> router_pb2_grpc.RouterAsyncStub:
    """Returns a stub that multiplexes its calls of RouteQuery, and the reports of requests, over one stream.

    Args:
        max_pause_s: as in `BatchWriter`.
    """
    stub: Any = router_pb2_grpc.RouterStub(channel)
    calls = router_pb2.RouteCall, router_pb2.RouteCalls
    stub.RouteQuery = MultiplexedCall("router", stub.RouteQuery, stub.Session, *calls, max_pause_s)
    stub.FreeRequest = stub.RouteQuery.beside(stub.FreeRequest, "free", "freed", "reports")
    mark = stub.MarkPrefillComplete
    stub.MarkPrefillComplete = stub.RouteQuery.beside(mark, "mark_prefill_complete", "marked", "reports")
    typed: router_pb2_grpc.RouterAsyncStub = stub
    return typed
