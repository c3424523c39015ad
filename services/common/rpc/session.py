"""Sessions: one long-lived bidirectional stream that carries many requests (design, rule 2).

Whatever is ready travels together and nothing waits to fill a batch: while one message is being written, the next one
collects in the owner's buffers. `drain` turns those buffers into one message, or None when they are empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar, cast

import grpc

from services.common.errors import ErrorKind, SluiceError
from services.common.observability.process_metrics import sessions
from services.common.rpc.errors import from_rpc_error

LAST_WRITE_S = 5.0
CUT_WRITE_S = 1.0


In = TypeVar("In")
Out = TypeVar("Out")


class BatchWriter(Generic[Out]):
    """Writes batches until cancelled or closed; `wake` says that there is something to write."""

    def __init__(self, drain: Callable[[], Out | None], write: Callable[[Out], Awaitable[Any]]) -> None:
        self._drain = drain
        self._write = write
        self._ready = asyncio.Event()
        self._closing = False
        self.wake = self._ready.set

    async def run(self) -> None:
        """Runs until cancelled, until the write fails, or until all is written after `close`."""
        while not self._closing or self._ready.is_set():
            await self._ready.wait()
            self._ready.clear()
            while (message := self._drain()) is not None:
                await self._write(message)

    def close(self) -> None:
        """Ends `run` as soon as everything that is ready has been written."""
        self._closing = True
        self.wake()

    def give_up(self) -> None:
        """Ends `run` after the write that is under way; what is still to be written is dropped."""
        self._drain = _nothing
        self.close()


def _nothing() -> None:
    return None


async def serve_session(
    context: grpc.aio.ServicerContext[In, Out],
    writer: BatchWriter[Out],
    on_message: Callable[[In], None],
    settled: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """The server's side: reads until the peer is done or gone, writes what the writer drains. A peer that is done but
    not gone still gets what is ready, or what is ready when `settled` returns.

    The caller cleans up its state after this returns or raises, whichever way the session ended.
    """
    handler = asyncio.current_task()
    assert handler is not None
    writing = _writing(writer, handler.cancel)
    sessions.alive += 1
    try:
        while (message := await context.read()) is not grpc.aio.EOF:
            on_message(message)
        if settled is not None:
            await settled()
        writer.close()
        await writing
    except asyncio.CancelledError:
        if writing.done() and not writing.cancelled():
            writing.result()  # the writer's failure is the reason, not the cancellation it caused
        await _last_write(writer, writing, CUT_WRITE_S)
        raise
    except Exception:
        await _last_write(writer, writing, LAST_WRITE_S)
        raise
    finally:
        sessions.alive -= 1
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def _last_write(writer: BatchWriter[Any], writing: asyncio.Task[None], timeout_s: float) -> None:
    """gRPC cannot tell the peer how the call ended while a write is under way: the peer would wait for ever, or hear
    of an end that is none."""
    writer.give_up()
    await asyncio.wait([writing], timeout=timeout_s)


def _writing(writer: BatchWriter[Any], on_death: Callable[[], Any]) -> asyncio.Task[None]:
    """Starts a writer whose failure ends the reader as well."""
    task = asyncio.get_running_loop().create_task(writer.run())
    task.add_done_callback(lambda done: None if done.cancelled() or done.exception() is None else on_death())
    return task


class ClientSession(Generic[Out, In]):
    """The caller's side of one session to one peer; used once: after it is lost, its owner makes another.

    Args:
        peer: what is called, in words for error messages.
        open_call: opens the stream; called by `run`.
        drain: next message to send, or None.
        on_message: takes each message received; must not block.
    """

    def __init__(
        self,
        peer: str,
        open_call: Callable[[], grpc.aio.StreamStreamCall[Out, In]],
        drain: Callable[[], Out | None],
        on_message: Callable[[In], None],
    ) -> None:
        self.peer = peer
        self._open_call = open_call
        self._on_message = on_message
        self._call: grpc.aio.StreamStreamCall[Out, In] | None = None
        self._writer = BatchWriter(drain, self._write)
        self.wake = self._writer.wake

    async def _write(self, message: Out) -> None:
        assert self._call is not None
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._writer.give_up()  # the call is over, and its reader hears why

    def close(self) -> None:
        """Ends the session from this side; `run` then returns."""
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> SluiceError:
        """Carries the session until it ends; returns why, as a typed retryable error. Cancel it to close."""
        call = self._call = self._open_call()
        writing = _writing(self._writer, call.cancel)
        sessions.alive += 1
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._on_message(cast(In, message))
            code = await call.code()
            if code is grpc.StatusCode.OK:
                return SluiceError(ErrorKind.DISCONNECTED, f"The {self.peer} closed the session.")
            return SluiceError(ErrorKind.DISCONNECTED, f"The connection to the {self.peer} was lost.")
        except grpc.aio.AioRpcError as error:
            cause = from_rpc_error(error, self.peer)
            if cause.kind is ErrorKind.UNAVAILABLE:
                return SluiceError(ErrorKind.DISCONNECTED, f"The connection to the {self.peer} was lost.")
            return cause
        except asyncio.CancelledError:
            handler = asyncio.current_task()
            if handler is not None and handler.cancelling():
                raise
            # Not this task but the call was cancelled: by `close`, or because the writer failed.
            if writing.done() and not writing.cancelled():
                writing.result()
            return SluiceError(ErrorKind.DISCONNECTED, f"The session with the {self.peer} was given up.")
        finally:
            sessions.alive -= 1
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            call.cancel()
