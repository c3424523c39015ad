"""Runs the user's own parsers in a process that is watched: it may raise, loop, grow or die, and only the stream that
made it do so loses its parser."""

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
"""An engine's package takes 15 s of CPU to import, and a busy machine gives it little."""

DEATHS_AT_MOST = 5
"""Deaths in a row that no stream explains before all streams go on as plain text."""

RETRY_S = 30.0

TOO_SLOW, DIED = "parser_too_slow", "parser_died"


class ParserHost:
    """One process for one own parser, begun again whenever it ends.

    Args:
        name: `module:Class`.
        time_s: how long one stream's share of a batch may take.
        memory_mb: how much the process may grow.
        on_death: the task that talks to the process failed.
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
        self._news = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the host
        self._file.truncate(PROGRESS.size)
        self._progress = mmap.mmap(self._file.fileno(), PROGRESS.size)
        self._deaths = 0
        self._not_before = 0.0

    @property
    def streams(self) -> int:
        """Streams that are parsed there."""
        return len(self._streams)

    @property
    def pid(self) -> int:
        """Of the process that runs now; 0 for none."""
        return self._process.pid if self._process is not None else 0

    def open(self, stream: Stream, names: ParserNames, context: ParserContext) -> RemoteStream:
        """A stream that is parsed there."""
        remote = RemoteStream(next(self._numbers), stream, names, context, self)
        self._streams[remote.number] = remote
        return remote

    def changed(self, stream: RemoteStream) -> None:
        """See remote.Host."""
        self._changed[stream.number] = stream
        self._news.set()

    def forget(self, stream: RemoteStream) -> None:
        """See remote.Host."""
        self._changed.pop(stream.number, None)
        if self._streams.pop(stream.number, None) is not None and stream.opened:
            self._closed.append(stream.number)
            self._news.set()

    async def start(self) -> None:
        """Starts the process; SluiceError when it cannot."""
        await self._start_or_say_why()
        self._tasks.spawn(self._run(), f"parser {self.name}")

    async def close(self) -> None:
        """Ends the process."""
        await self._tasks.close()
        await self._kill()
        self._progress.close()
        self._file.close()

    async def _start_or_say_why(self) -> None:
        """As `_start`, with every failure as a SluiceError: where a system is short of memory or of descriptors it
        raises what it likes, and a parser without a process must not end the service.
        """
        try:
            await self._start()
        except SluiceError:
            raise
        except Exception as error:
            log.warning("a parser's process cannot be started", extra={"parser": self.name}, exc_info=error)
            await self._kill()
            raise unavailable(f"The parser {self.name} cannot be started now; the log above says why.") from None

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
            raise unavailable(f"The parser {self.name} did not start within {START_TIMEOUT_S:.0f} s.") from None
        except (EOFError, ValueError):
            await self._kill()
            raise invalid(f"The parser {self.name} does not start; the log above says why.") from None
        self.markers = frozenset(hello[self.name])

    async def _clear(self) -> None:
        """Before a new process begins."""
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
        """Gives the process what has changed, a batch at a time; what changes meanwhile is the next batch."""
        while True:
            await self._news.wait()
            self._news.clear()
            operations, asked = self._batch()
            reason = await self._exchange(operations, asked) if operations else ""
            if reason:
                await self._begin_again(reason)
            else:
                self._deaths = 0

    def _batch(self) -> tuple[list[list[Any]], dict[int, RemoteStream]]:
        operations: list[list[Any]] = [["close", number] for number in self._closed]
        self._closed.clear()
        asked, self._changed = self._changed, {}
        for number, stream in asked.items():
            if not stream.opened:
                stream.opened = True
                names = [stream.names.tool, stream.names.reasoning]
                replayed = [stream.pieces[: stream.told], stream.tokens_of(0, stream.told)]
                operations.append(["open", number, names, pack_context(stream.context), *replayed])
            last = stream.ending is not None
            if pieces := stream.pieces[stream.sent : len(stream.pieces) - last]:
                operations.append(["feed", number, pieces, stream.tokens_of(stream.sent, stream.sent + len(pieces))])
            if last and not stream.end_sent:
                operations.append(["end", number, stream.pieces[-1:], stream.tokens_of(len(stream.pieces) - 1)])
                stream.end_sent = True
            stream.sent = len(stream.pieces)
        return operations, asked

    async def _exchange(self, operations: list[list[Any]], asked: dict[int, RemoteStream]) -> str:
        """One batch and its answers; why the process is of no use any more, empty for success."""
        try:
            answers = await self._ask(operations)
            for number, pieces, events, held, reasoning_tokens, failed in answers:
                stream = asked.get(number)
                if stream is not None and number in self._streams:
                    stream.answer(pieces, unpack_events(events), held, reasoning_tokens, failed)
        except TimeoutError:
            return TOO_SLOW
        except (EOFError, OSError, ValueError, TypeError, KeyError):
            return DIED
        return ""

    async def _ask(self, operations: list[list[Any]], time_s: float = 0.0) -> Any:
        """TimeoutError when one operation takes longer than it may."""
        if self._writer is None:
            await self._try_again()
        assert self._writer is not None
        self._writer.write(frame(operations))
        answering = asyncio.ensure_future(self._read())
        try:
            seen = self._begun
            while True:
                await asyncio.wait({answering}, timeout=time_s or self._time_s)
                if answering.done():
                    return answering.result()
                if self._begun == seen:
                    raise TimeoutError
                seen = self._begun
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _try_again(self) -> None:
        """After it was given up, the process gets another chance now and then; EOFError when it is not the time."""
        if asyncio.get_running_loop().time() < self._not_before:
            raise EOFError("there is no process")
        try:
            await self._start_or_say_why()
        except SluiceError as error:
            raise EOFError(error.message) from None

    @property
    def _begun(self) -> int:
        begun: int = PROGRESS.unpack_from(self._progress, 0)[0]
        return begun

    async def _begin_again(self, reason: str) -> None:
        """A new process: the stream that was being parsed is to blame, the others are replayed.

        A process may be killed from outside while it parses what is harmless: a death is forgiven once, a limit that
        was passed is not.
        """
        blamed: int = PROGRESS.unpack_from(self._progress, 0)[1]
        log.warning("the process of a parser is begun again", extra={"parser": self.name, "reason": reason})
        await self._clear()
        PROGRESS.pack_into(self._progress, 0, 0, 0)
        self._deaths = 0 if blamed in self._streams else self._deaths + 1
        hopeless = self._deaths >= DEATHS_AT_MOST
        if not hopeless:
            try:
                await self._start_or_say_why()
            except SluiceError as error:
                log.error("%s", error.message)
                hopeless = True
        now = asyncio.get_running_loop().time()
        if hopeless and now >= self._not_before:  # else nobody tried, and streams that come do not put it off
            self._not_before = now + RETRY_S
        for number, stream in list(self._streams.items()):
            forgiven = reason == DIED and not stream.forgiven
            stream.forgiven |= number == blamed
            stream.lost((number == blamed and not forgiven) or hopeless, reason)
            if stream.finish is None and len(stream.pieces) > stream.told:
                self.changed(stream)
        self._closed.clear()
