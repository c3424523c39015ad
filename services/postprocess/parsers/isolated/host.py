"""Runs custom parsers in a supervised process.

If the process raises, hangs, exceeds its memory or dies, only the stream that caused it loses its parser.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from typing import Any

from services.common.errors import SluiceError, invalid, unavailable
from services.common.tasks import TaskOwner
from services.postprocess.detokenize.stream import Stream
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.isolated.remote import RemoteStream
from services.postprocess.parsers.isolated.wire import (
    FRAME_AT_MOST,
    HEADER,
    PROGRESS,
    frame,
    pack_context,
    unframe,
    unpack_events,
)

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Importing an engine's package takes 15 s of CPU time, and much longer on a busy machine."""

DEATHS_AT_MOST = 5
"""Consecutive deaths that no stream caused, after which all streams continue as plain text."""

RETRY_S = 30.0

TOO_SLOW, DIED = "parser_too_slow", "parser_died"


class ParserHost:
    """Manages the process of one custom parser, and restarts it whenever it ends.

    Args:
        name: `module:Class`.
        time_s: time limit of one operation of a batch.
        memory_mb: how much memory the process can allocate after its start.
        on_death: called if the task that communicates with the process fails.
    """

    def __init__(
        self,
        name: str,
        time_s: float,
        memory_mb: int,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.name = name
        self.markers: frozenset[str] = frozenset()
        self._time_s = time_s
        self._memory_mb = memory_mb
        self._tasks = TaskOwner(on_death)
        self._numbers = count(1)
        self._streams: dict[int, RemoteStream] = {}
        self._changed: dict[int, RemoteStream] = {}
        self._closed: list[int] = []
        self._pending = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open for the lifetime of the host
        self._file.truncate(PROGRESS.size)
        self._progress = mmap.mmap(self._file.fileno(), PROGRESS.size)
        self._deaths = 0
        self._not_before = 0.0

    @property
    def streams(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    @property
    def pid(self) -> int:
        """Id of the running process; 0 for none."""
        return self._process.pid if self._process is not None else 0

    def open(self, stream: Stream, names: ParserNames, context: ParserContext) -> RemoteStream:
        """Opens a stream that is parsed in the process."""
        remote = RemoteStream(next(self._numbers), stream, names, context, self)
        self._streams[remote.number] = remote
        return remote

    def changed(self, stream: RemoteStream) -> None:
        """See remote.Host."""
        self._changed[stream.number] = stream
        self._pending.set()

    def forget(self, stream: RemoteStream) -> None:
        """See remote.Host."""
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
        self._file.close()

    async def _start_checked(self) -> None:
        """Starts the process; raises every failure as SluiceError.

        Low memory or file descriptors can raise any exception here, and a failed parser must not end the service.
        """
        try:
            await self._start()
        except SluiceError:
            raise
        except Exception as error:
            log.warning("cannot start the process of a parser", extra={"parser": self.name}, exc_info=error)
            await self._kill()
            raise unavailable(f"The parser {self.name} cannot be started now; see the log above.") from None

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.postprocess.parsers.isolated.child"),
            *(str(self._file.fileno()), str(self._memory_mb), self.name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._file.fileno(),),
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader, self._writer = self._process.stdout, self._process.stdin
        try:
            hello = await asyncio.wait_for(self._read(), START_TIMEOUT_S)
        except TimeoutError:
            await self._kill()
            message = f"The parser {self.name} did not start within {START_TIMEOUT_S:.0f} s; retry later."
            raise unavailable(message) from None
        except (EOFError, ValueError):
            await self._kill()
            raise invalid(f"The parser {self.name} does not start; see the log above.") from None
        self.markers = frozenset(hello[self.name])

    async def _clear(self) -> None:
        """Cleans up before a new process starts."""
        await self._kill()

    async def _kill(self) -> None:
        process, self._process, self._reader, self._writer = self._process, None, None, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def _read(self) -> Any:
        assert self._reader is not None
        try:
            head = await self._reader.readexactly(HEADER.size)
            size = HEADER.unpack(head)[0]
            if size > FRAME_AT_MOST:
                raise ValueError(f"a frame of {size} bytes")
            return unframe(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            raise EOFError("the process ended") from None

    async def _run(self) -> None:
        """Sends changed streams to the process in batches; changes during a batch form the next one."""
        while True:
            await self._pending.wait()
            self._pending.clear()
            operations, streams = self._batch()
            reason = await self._run_batch(operations, streams) if operations else ""
            if reason:
                await self._restart(reason)
            else:
                self._deaths = 0

    def _batch(self) -> tuple[list[list[Any]], dict[int, RemoteStream]]:
        operations: list[list[Any]] = [["close", number] for number in self._closed]
        self._closed.clear()
        streams, self._changed = self._changed, {}
        for number, stream in streams.items():
            if not stream.opened:
                stream.opened = True
                names = [stream.names.tool, stream.names.reasoning]
                replayed = [stream.pieces[: stream.parsed], stream.tokens_of(0, stream.parsed)]
                operations.append(["open", number, names, pack_context(stream.context), *replayed])
            last = stream.ending is not None
            if pieces := stream.pieces[stream.sent : len(stream.pieces) - last]:
                operations.append(["feed", number, pieces, stream.tokens_of(stream.sent, stream.sent + len(pieces))])
            if last and not stream.end_sent:
                operations.append(["end", number, stream.pieces[-1:], stream.tokens_of(len(stream.pieces) - 1)])
                stream.end_sent = True
            stream.sent = len(stream.pieces)
        return operations, streams

    async def _run_batch(self, operations: list[list[Any]], streams: dict[int, RemoteStream]) -> str:
        """Runs one batch; returns why the process must be replaced, empty for success."""
        try:
            results = await self._call(operations)
            for number, pieces, events, held, reasoning_tokens, failed in results:
                stream = streams.get(number)
                if stream is not None and number in self._streams:
                    stream.add_result(pieces, unpack_events(events), held, reasoning_tokens, failed)
        except TimeoutError:
            return TOO_SLOW
        except (EOFError, OSError, ValueError, TypeError, KeyError):
            return DIED
        return ""

    async def _call(self, operations: list[list[Any]], time_s: float = 0.0) -> Any:
        """Sends operations and returns their results; raises TimeoutError if one operation exceeds its time limit."""
        if self._writer is None:
            await self._retry_start()
        assert self._writer is not None
        self._writer.write(frame(operations))
        reading = asyncio.ensure_future(self._read())
        try:
            started = self._started
            while True:
                await asyncio.wait({reading}, timeout=time_s or self._time_s)
                if reading.done():
                    return reading.result()
                if self._started == started:
                    raise TimeoutError
                started = self._started
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

    @property
    def _started(self) -> int:
        """Number of operations that the process has started."""
        started: int = PROGRESS.unpack_from(self._progress, 0)[0]
        return started

    async def _restart(self, reason: str) -> None:
        """Starts a new process; the stream that was being parsed loses its parser, the others are replayed.

        A process may be killed from outside while it parses a harmless stream, so one death is forgiven; exceeding a
        limit is not.
        """
        blamed: int = PROGRESS.unpack_from(self._progress, 0)[1]
        log.warning("restarting the process of a parser", extra={"parser": self.name, "reason": reason})
        await self._clear()
        PROGRESS.pack_into(self._progress, 0, 0, 0)
        self._deaths = 0 if blamed in self._streams else self._deaths + 1
        hopeless = self._deaths >= DEATHS_AT_MOST
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
