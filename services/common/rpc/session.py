"""Sessions: long-lived bidirectional streams that carry many requests each (design, rule 2).

A message costs each of its two processes about 100 µs, whatever it carries. The first one after a silence is sent at
once; a session that writes continuously pauses between two messages, while the next one collects in the owner's
buffers. `drain` turns those buffers into one message, or None when they are empty.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, Generic, TypeVar

import grpc

from services.common.base.budgets import Budget
from services.common.base.errors import SESSION_CLOSED, ErrorKind, SluiceError
from services.common.observability.process_metrics import sessions
from services.common.rpc.errors import from_rpc_error, is_typed

LAST_WRITE_S = 5.0
CANCELLED_WRITE_S = 1.0
MIN_PAUSE_S = 0.001
"""Seconds between two messages of a session while the event loop keeps up."""
TIMER_S = 0.001
"""Resolution of the event loop's timers: a pause that ends as late as this is not a sign of lag."""


FRAMES, WINDOW_S = 200, 0.1
"""Messages read of one session in a time; one that writes continuously sends half as many, so more are read later."""

MAX_IDLE_PER_S = 1_000
"""Messages without an effect that a process reads in a second, of all sessions together; senders of more wait."""

In = TypeVar("In")
Out = TypeVar("Out")

_FRAMES = Budget("worker_frames", FRAMES, "")
_LEFT = "the peer of a session disconnected while a message was written to it"

log = logging.getLogger(__name__)


class FramePace:
    """Spaces out the reading of a stream whose peer sends far more messages than an honest one does.

    The peer's stream then fills up, so that it waits; other streams keep their share of the event loop.

    Args:
        frames: messages read in each WINDOW_S.
    """

    def __init__(self, frames: int = FRAMES) -> None:
        self._frames = frames
        self._count = 0
        self._until_s = 0.0

    def pause_s(self) -> float:
        """Counts a message; returns how long to wait before the next one is read."""
        self._count += 1
        if self._count < self._frames:
            return 0.0
        now = perf_counter()
        left_s, self._count = self._until_s - now, 0
        self._until_s = max(self._until_s, now - WINDOW_S) + WINDOW_S
        if left_s <= 0:
            return 0.0
        _FRAMES.count()
        return left_s


class IdlePace:
    """Spaces out the reading of messages without an effect, of all sessions of a process together.

    An honest peer sends none, or a few at the end of a stream. A hundred hostile ones, each below the pace of its own
    session, would take the event loop.
    """

    def __init__(self, per_s: float = MAX_IDLE_PER_S) -> None:
        self._interval_s = 1 / per_s
        self._due_s = 0.0

    def pause_s(self) -> float:
        """Counts a message; returns how long its session waits before it reads the next one."""
        now = perf_counter()
        self._due_s = max(self._due_s, now - WINDOW_S) + self._interval_s
        if self._due_s <= now:
            return 0.0
        _FRAMES.count()
        return self._due_s - now


_IDLE = IdlePace()


class BatchWriter(Generic[Out]):
    """Writes batches until cancelled or closed; `wake` signals pending output.

    Args:
        max_pause_s: longest pause between two messages; it grows from `MIN_PAUSE_S` with the lag of the event loop,
            because a loop that lags has more to send with each message. 0: none.
        ended: errors of a write after which the reader of the same stream receives the reason; they end `run`.
    """

    def __init__(
        self,
        drain: Callable[[], Out | None],
        write: Callable[[Out], Awaitable[Any]],
        max_pause_s: float = 0.0,
        ended: tuple[type[Exception], ...] = (),
    ) -> None:
        self._drain = drain
        self._write = write
        self._ended = ended
        self._ready = False
        self._waiting: asyncio.Future[None] | None = None
        self._closing = False
        self._min_pause_s = min(MIN_PAUSE_S, max_pause_s)
        self._max_pause_s = max_pause_s
        self._pause_s = self._min_pause_s
        self._due_s = 0.0  # when the next message may be sent
        self._paused = False

    def wake(self) -> None:
        """Has what `drain` returns sent, now or after the pause."""
        self._ready = True
        if not self._paused:
            self._resume()

    async def run(self) -> None:
        """Runs until cancelled, until a write fails, or until everything is written after `close`."""
        try:
            while not self._closing or self._ready:
                if not self._ready:
                    self._waiting = asyncio.get_running_loop().create_future()
                    await self._waiting
                self._pause_s = self._min_pause_s
                if (left_s := self._due_s - perf_counter()) > 0 and not self._closing:
                    await self._pause(left_s)
                self._ready = False
                while (message := self._drain()) is not None:
                    await self._write(message)
                    self._due_s = perf_counter() + self._pause_s
                    if self._ready:
                        if not self._closing:
                            await self._pause(self._pause_s)
                        self._ready = False
        except self._ended:
            self.give_up()

    async def _pause(self, left_s: float) -> None:
        """Waits until the next message may be sent, or until `close` is called."""
        loop = asyncio.get_running_loop()
        self._waiting, self._paused = loop.create_future(), True
        timer = loop.call_later(left_s, self._resume)
        try:
            await self._waiting
        finally:
            timer.cancel()
            self._paused = False
        lag_s = perf_counter() - self._due_s - TIMER_S
        self._pause_s = min(self._min_pause_s + max(lag_s, 0.0), self._max_pause_s)

    def _resume(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        """Ends `run` once all pending output is written."""
        self._closing = True
        self.wake()
        self._resume()

    def give_up(self) -> None:
        """Ends `run` after the current write; drops pending output."""
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
    """Serves a session: reads until the peer half-closes or disconnects, and writes drained messages.

    After a half-close, flushes pending output (waiting for `settled` first, if given). The caller cleans up its state
    after this returns or raises, however the session ended; it is cancelled when the peer has disconnected.
    """
    handler = asyncio.current_task()
    assert handler is not None
    writing = _start_writer(writer, handler.cancel)
    sessions.alive += 1
    try:
        pace = FramePace()
        while (message := await context.read()) is not grpc.aio.EOF:
            on_message(message)
            if pause_s := pace.pause_s():
                await asyncio.sleep(pause_s)
        if settled is not None:
            await settled()
        writer.close()
        await writing
    except asyncio.CancelledError:
        if writing.done() and not writing.cancelled():
            try:
                writing.result()  # report the writer's failure, not the cancellation it caused
            except grpc.aio.InternalError:
                log.info("%s", _LEFT)
        await _last_write(writer, writing, CANCELLED_WRITE_S)
        raise
    except grpc.aio.InternalError:
        log.info("%s", _LEFT)
        raise asyncio.CancelledError from None
    except Exception:
        await _last_write(writer, writing, LAST_WRITE_S)
        raise
    finally:
        sessions.alive -= 1
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def _last_write(writer: BatchWriter[Any], writing: asyncio.Task[None], timeout_s: float) -> None:
    """Waits briefly for the current write.

    gRPC cannot send the call's status while a write is in progress: the peer would wait forever or see a false end.
    """
    writer.give_up()
    await asyncio.wait([writing], timeout=timeout_s)


def _start_writer(writer: BatchWriter[Any], on_death: Callable[[], Any]) -> asyncio.Task[None]:
    """Starts a writer task whose failure also ends the reader."""
    task = asyncio.get_running_loop().create_task(writer.run())
    task.add_done_callback(lambda done: None if done.cancelled() or done.exception() is None else on_death())
    return task


class ClientSession(Generic[Out, In]):
    """The caller's side of one session to one peer; used once: its owner creates another after it is lost.

    Args:
        peer: the peer's name in error messages.
        open_call: opens the stream; called by `run`.
        drain: returns the next message to send, or None.
        on_message: receives each message; must not block. False: the message had no effect.
        max_pause_s: as in `BatchWriter`.
        parse: parses the messages of a call that returns them unparsed; the next one is read when it has returned.
        idle: the pace of messages without an effect, which sessions share.
    """

    def __init__(
        self,
        peer: str,
        open_call: Callable[[], grpc.aio.StreamStreamCall[Out, In]],
        drain: Callable[[], Out | None],
        on_message: Callable[[In], bool | None],
        max_pause_s: float = 0.0,
        parse: Callable[[Any], Awaitable[Any]] | None = None,
        idle: IdlePace = _IDLE,
    ) -> None:
        self.peer = peer
        self._open_call = open_call
        self._parse = parse
        self._on_message = on_message
        self._idle = idle
        self._call: grpc.aio.StreamStreamCall[Out, In] | None = None
        self._writer = BatchWriter(drain, self._write, max_pause_s, (grpc.aio.AioRpcError, asyncio.InvalidStateError))
        self.wake = self._writer.wake

    def _write(self, message: Out) -> Awaitable[None]:
        assert self._call is not None
        return self._call.write(message)

    def close(self) -> None:
        """Ends the session from this side; `run` then returns."""
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> SluiceError:
        """Runs the session until it ends and returns why, as a typed retryable error. Cancel it to close."""
        try:
            call = self._call = self._open_call()
        except grpc.aio.UsageError:
            return SluiceError(ErrorKind.DISCONNECTED, f"The connection to the {self.peer} has been closed.")
        writing = _start_writer(self._writer, call.cancel)
        sessions.alive += 1
        try:
            pace = FramePace()
            while (message := await call.read()) is not grpc.aio.EOF:
                received: Any = message if self._parse is None else await self._parse(message)
                had_effect = self._on_message(received)
                del message, received  # a large one is not held until the next one has arrived
                if pause_s := pace.pause_s() or (self._idle.pause_s() if had_effect is False else 0.0):
                    await asyncio.sleep(pause_s)
            code = await call.code()
            if code is grpc.StatusCode.OK:
                return SluiceError(ErrorKind.DISCONNECTED, f"The {self.peer} closed the session.", code=SESSION_CLOSED)
            return SluiceError(ErrorKind.DISCONNECTED, f"The connection to the {self.peer} was lost.")
        except grpc.aio.AioRpcError as error:
            cause = from_rpc_error(error, self.peer)
            # A stream that a killed process leaves may end with INTERNAL, too; a peer sends a detail with its own.
            broken = error.code() is grpc.StatusCode.INTERNAL and not is_typed(error)
            if broken or cause.kind is ErrorKind.UNAVAILABLE:
                return SluiceError(ErrorKind.DISCONNECTED, f"The connection to the {self.peer} was lost.")
            return cause
        except asyncio.CancelledError:
            handler = asyncio.current_task()
            if handler is not None and handler.cancelling():
                raise
            # The call was cancelled, not this task: by `close`, or because the writer failed.
            if writing.done() and not writing.cancelled():
                writing.result()
            return SluiceError(ErrorKind.DISCONNECTED, f"The session with the {self.peer} was closed.")
        finally:
            sessions.alive -= 1
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            call.cancel()
