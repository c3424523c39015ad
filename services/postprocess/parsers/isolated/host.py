"""Runs custom parsers in a supervised process.

If the process raises, hangs, exceeds its memory or dies, only the stream that caused it loses its parser.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from itertools import count
from typing import Any

from services.common.base.errors import SluiceError, invalid, unavailable
from services.common.base.shared_steps import shared_step
from services.common.base.tasks import TaskOwner
from services.common.child_rpc.child import ChildLimits
from services.common.child_rpc.process import Child, module_command
from services.postprocess.detokenize.stream import Stream
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.isolated.wire import Progress, decode, encode, pack_context, unpack_events
from services.postprocess.parsers.remote import RemoteStream

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Importing an engine's package takes 15 s of CPU time, and much longer on a busy machine."""

MAX_FRAME_BYTES = 64 << 20
"""Bytes of a message of a process of custom parsers; a process that sends a longer one is replaced."""

MAX_DEATHS = 5
"""Consecutive deaths that no stream caused, after which all streams continue as plain text."""

RETRY_S = 30.0

TOO_SLOW, DIED, FAILED = "parser_too_slow", "parser_died", "parser_failed"


class ParserHost:
    """Manages the process of one custom parser, and restarts it whenever it ends.

    Args:
        name: `module:Class`.
        limits: of the process; the time is that of one operation of a batch.
        on_death: called if the task that communicates with the process fails.
    """

    with_tokens = False
    """Whether the parsers need the tokens of the text."""

    def __init__(
        self,
        name: str,
        limits: ChildLimits,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.name = name
        self.markers: frozenset[str] = frozenset()
        self._limits = limits
        self._tasks = TaskOwner(on_death)
        self._numbers = count(1)
        self._streams: dict[int, RemoteStream] = {}
        self._changed: dict[int, RemoteStream] = {}
        self._closed: list[int] = []
        self._pending = asyncio.Event()
        self._turn = asyncio.Lock()  # held during an exchange with the process
        self._child: Child | None = None
        self._progress = Progress()
        self._deaths = 0
        self._not_before = 0.0

    @property
    def streams(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    @property
    def pid(self) -> int:
        """Id of the running process; 0 for none."""
        return self._child.pid if self._child is not None else 0

    def open(self, stream: Stream, names: ParserNames, context: ParserContext) -> RemoteStream:
        """Opens a stream that is parsed in the process."""
        remote = RemoteStream(next(self._numbers), stream, names, context, self, self.with_tokens)
        self._streams[remote.number] = remote
        return remote

    def changed(self, stream: RemoteStream) -> None:
        """Schedules a stream that has text to parse."""
        self._changed[stream.number] = stream
        self._pending.set()

    def forget(self, stream: RemoteStream) -> None:
        """Closes a stream."""
        self._changed.pop(stream.number, None)
        if self._streams.pop(stream.number, None) is not None and stream.opened:
            self._closed.append(stream.number)
            self._pending.set()

    async def start(self) -> None:
        """Starts the process; raises SluiceError if it does not start."""
        await self._start_checked()
        self._tasks.spawn(self._run(), f"parser {self.name}")

    async def close(self) -> None:
        """Ends the process."""
        await self._tasks.close()
        await self._kill()
        self._progress.close()

    async def _start_checked(self) -> None:
        """Starts the process; raises every failure as SluiceError.

        Low memory or file descriptors can raise any exception here, and a failed parser must not end the service.
        """
        try:
            await self._start()
        except SluiceError:
            await self._kill()
            raise
        except Exception as error:
            log.warning("cannot start the process of a parser", extra={"parser": self.name}, exc_info=error)
            await self._kill()
            raise unavailable(f"The parser {self.name} cannot be started now; see the log above.") from None

    async def _start(self) -> None:
        arguments = (self._progress.descriptor, self._limits, self.name)
        try:
            self._child, hello = await Child.start(
                module_command("services.postprocess.parsers.isolated.child", *arguments),
                MAX_FRAME_BYTES,
                START_TIMEOUT_S,
                {**os.environ, "PYTHONUNBUFFERED": "1"},
                [self._progress.descriptor],
            )
        except TimeoutError:
            message = f"The parser {self.name} did not start within {START_TIMEOUT_S:.0f} s; retry later."
            raise unavailable(message) from None
        except (EOFError, ValueError):
            raise invalid(f"The parser {self.name} does not start; see the log above.") from None
        self.markers = frozenset(hello[self.name])

    async def _clear(self) -> None:
        """Ends the process before a new one starts."""
        child, self._child = self._child, None
        if child is not None:
            await child.end()

    async def _kill(self) -> None:
        """Ends all processes."""
        await self._clear()

    async def _run(self) -> None:
        """Sends changed streams to the process in batches; changes during a batch form the next one."""
        while True:
            await self._pending.wait()
            self._pending.clear()
            async with self._turn:
                operations, streams = self._batch()
                reason = await self._run_batch(operations, streams) if operations else ""
                if reason:
                    await self._restart(reason)
                else:
                    self._deaths = 0

    @shared_step("postprocess.parser_batch")
    def _batch(self) -> tuple[list[list[Any]], dict[int, RemoteStream]]:
        operations: list[list[Any]] = [["close", number] for number in self._closed]
        self._closed.clear()
        streams, self._changed = self._changed, {}
        for number, stream in streams.items():
            if not stream.opened:
                try:
                    opening = _opening(stream)
                    encode(opening)  # what cannot be sent must not fail the operations of the others
                except (ValueError, TypeError, RecursionError):
                    log.exception("a stream cannot be sent to its parser", extra={"parser": self.name})
                    stream.restart(True, FAILED)
                    continue
                stream.opened = True
                operations.append(opening)
            last = stream.ending is not None
            if pieces := stream.pieces[stream.sent : len(stream.pieces) - last]:
                operations.append(["feed", number, pieces, stream.tokens_of(stream.sent, stream.sent + len(pieces))])
            if last and not stream.end_sent:
                operations.append(["end", number, stream.pieces[-1:], stream.tokens_of(len(stream.pieces) - 1)])
                stream.end_sent = True
            stream.sent = len(stream.pieces)
        return operations, streams

    @shared_step("postprocess.parser_results")
    async def _run_batch(self, operations: list[list[Any]], streams: dict[int, RemoteStream]) -> str:
        """Runs one batch; returns why the process must be replaced, empty for success."""
        try:
            results = await self._call(operations)
            for number, pieces, events, held, reasoning_tokens, failed in results:
                stream = streams.get(number)
                if stream is not None and number in self._streams:
                    self._add_result(stream, pieces, events, held, reasoning_tokens, failed)
        except TimeoutError:
            return TOO_SLOW
        except (EOFError, OSError, ValueError, TypeError, KeyError):
            return DIED
        return ""

    def _add_result(
        self, stream: RemoteStream, pieces: int, events: Any, held: str, reasoning_tokens: int, failed: bool
    ) -> None:
        """Adds the result of one stream; one that cannot be read costs the stream its parser."""
        try:
            unpacked = unpack_events(events)
        except (ValueError, TypeError, KeyError):
            log.exception("the events of a parser cannot be read", extra={"parser": self.name})
            self._closed.append(stream.number)
            stream.restart(True, FAILED)
        else:
            stream.add_result(pieces, unpacked, held, reasoning_tokens, failed)

    async def _call(self, operations: list[list[Any]], time_s: float = 0.0) -> Any:
        """Sends operations and returns their results; raises TimeoutError if one operation exceeds its time limit."""
        if self._child is None:
            await self._retry_start()
        assert self._child is not None
        self._child.send(encode(operations))
        reading = asyncio.ensure_future(self._child.receive())
        try:
            started = self._progress.started
            while True:
                await asyncio.wait({reading}, timeout=time_s or self._limits.call_s)
                if reading.done():
                    return decode(reading.result())
                if self._progress.started == started:
                    raise TimeoutError
                started = self._progress.started
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _retry_start(self) -> None:
        """Starts the process again after repeated failures, at intervals; raises EOFError before the next attempt."""
        if asyncio.get_running_loop().time() < self._not_before:
            raise EOFError("the process is not running")
        try:
            await self._start_checked()
        except SluiceError as error:
            raise EOFError(error.message) from None

    async def _restart(self, reason: str) -> None:
        """Starts a new process; the stream that was being parsed loses its parser, the others are replayed.

        A process may be killed from outside while it parses a harmless stream, so one death is forgiven; exceeding a
        limit is not.
        """
        blamed = self._progress.stream
        log.warning("restarting the process of a parser", extra={"parser": self.name, "reason": reason})
        await self._clear()
        self._progress.set(0, 0)
        self._deaths = 0 if blamed in self._streams else self._deaths + 1
        hopeless = self._deaths >= MAX_DEATHS
        if not hopeless:
            try:
                await self._start_checked()
            except SluiceError as error:
                log.error("%s", error.message)
                hopeless = True
        now = asyncio.get_running_loop().time()
        if hopeless and now >= self._not_before:  # without an attempt, new streams must not postpone the next one
            self._not_before = now + RETRY_S
        for number, stream in list(self._streams.items()):
            forgiven = reason == DIED and not stream.forgiven
            stream.forgiven |= number == blamed
            stream.restart((number == blamed and not forgiven) or hopeless, reason)
            if stream.finish is None and len(stream.pieces) > stream.parsed:
                self.changed(stream)
        self._closed.clear()


def _opening(stream: RemoteStream) -> list[Any]:
    """Returns the operation that opens a stream, with the pieces that a previous process parsed."""
    names = [stream.names.tool, stream.names.reasoning]
    replayed = [stream.pieces[: stream.parsed], stream.tokens_of(0, stream.parsed)]
    return ["open", stream.number, names, pack_context(stream.context), *replayed]
