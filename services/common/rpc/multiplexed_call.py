"""Calls of a unary RPC that share one stream: the caller's side. `call_session` is the server's.

A unary call costs gRPC some 250 µs of both processes' CPU whatever it carries, one on a session a tenth of that, and
what is ready together travels together. Whoever calls sees no difference: a `MultiplexedCall` is called like the unary
method, and fails like it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, Generic, TypeVar, cast

import grpc
from google.protobuf.message import Message

from services.common.packing import pack_u32
from services.common.rpc.errors import DETAIL_KEY, from_detail, status_of
from services.common.rpc.session import ClientSession

MOST_BYTES = 1 << 20
"""Larger requests are calls of their own: nobody else's has to wait until they have been read."""
BYTES_PER_MESSAGE = 4 << 20
AGAIN_S = 0.1

Q = TypeVar("Q", bound=Message)
A = TypeVar("A")


class MultiplexedCall(Generic[Q, A]):
    """One unary RPC of one peer.

    `run` keeps a session open while the peer is `welcome`; before, between and without sessions, as with a peer that
    does not know them, every call is a unary one.

    Args:
        peer: what is called, in words for messages.
        unary: the RPC.
        session: opens the stream.
        make_call: the message of one call, such as `TokenizeCall`.
        make_calls: the message of several.
    """

    def __init__(
        self,
        peer: str,
        unary: Callable[..., Awaitable[A]],
        session: Callable[[], grpc.aio.StreamStreamCall[Any, Any]],
        make_call: Callable[..., Any],
        make_calls: Callable[..., Any],
    ) -> None:
        self._peer = peer
        self._unary = unary
        self._open_session = session
        self._make_call = make_call
        self._make_calls = make_calls
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[A]] = {}
        self._calls: list[Any] = []
        self._cancels: list[int] = []
        self._welcome = asyncio.Event()
        self._session: ClientSession[Any, Any] | None = None
        self._greeted = False  # the session is open

    async def __call__(self, request: Q, *, timeout: float, metadata: Sequence[tuple[str, str]] | None = None) -> A:
        """One call; AioRpcError as the unary RPC.

        Args:
            timeout: longest wait, seconds.
        """
        session = self._session
        usable = self._greeted and self._welcome.is_set() and request.ByteSize() <= MOST_BYTES
        if session is None or not usable:
            return await self._unary(request, timeout=timeout, metadata=metadata)
        loop = asyncio.get_running_loop()
        number = next(self._numbers) & 0xFFFFFFFF
        answer = self._waiting[number] = loop.create_future()
        self._calls.append(self._make_call(number=number, request=request, metadata=dict(metadata or ())))
        session.wake()
        ringing = loop.call_later(timeout, _fail, answer, grpc.StatusCode.DEADLINE_EXCEEDED)
        try:
            return cast(A, await answer)
        finally:
            ringing.cancel()
            if self._waiting.pop(number, None) is not None:  # nobody answered
                self._cancels.append(number)
                session.wake()
            self._close_if_done()
            del answer  # what it raises holds this call, which must not hold it as well

    async def run(self) -> None:
        """Keeps a session open until cancelled."""
        while True:
            await self._welcome.wait()
            self._session = ClientSession(self._peer, self._open_session, self._drain, self._take)
            try:
                await self._session.run()
            finally:
                greeted, self._greeted, self._session = self._greeted, False, None
                self._fail_all()
            if not greeted:  # it does not know sessions, or is gone
                self._welcome.clear()
            await asyncio.sleep(AGAIN_S)

    def welcome(self, yes: bool) -> None:
        """Whether the peer takes calls now. When not, the session ends with the last answer."""
        if yes:
            self._welcome.set()
        else:
            self._welcome.clear()
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._session is not None and not self._waiting and not self._welcome.is_set():
            self._session.close()

    def _drain(self) -> Any | None:
        if not self._calls and not self._cancels:
            return None
        taken, size = 0, 0
        while taken < len(self._calls) and size < BYTES_PER_MESSAGE:
            size += self._calls[taken].ByteSize()
            taken += 1
        calls, self._calls = self._calls[:taken], self._calls[taken:]
        cancels: list[int] = []
        if not self._calls:  # a cancel must not overtake its call
            cancels, self._cancels = self._cancels, []
        return self._make_calls(calls=calls, cancels=pack_u32(cancels))

    def _take(self, message: Any) -> None:
        self._greeted = True
        for one in message.answers:
            waiting = self._waiting.pop(one.number, None)
            if waiting is None or waiting.done():
                continue
            if one.HasField("error"):
                waiting.set_exception(_typed(one.error))
            else:
                waiting.set_result(one.response)

    def _fail_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._calls.clear()
        self._cancels.clear()
        for answer in waiting.values():
            _fail(answer, grpc.StatusCode.UNAVAILABLE)


def _fail(answer: asyncio.Future[Any], code: grpc.StatusCode) -> None:
    if not answer.done():
        answer.set_exception(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata()))


def _typed(detail: Any) -> grpc.aio.AioRpcError:
    said = grpc.aio.Metadata((DETAIL_KEY, detail.SerializeToString()))
    return grpc.aio.AioRpcError(status_of(from_detail(detail).kind), grpc.aio.Metadata(), said, detail.message)
