"""Runs the parsers that an engine ships, in its own interpreter; see `engines.host` for the other side."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ErrorKind, SluiceError, quoted, unavailable
from services.postprocess.detokenize.stream import Stream
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.engines import ENGINES, bare, nearest
from services.postprocess.parsers.engines.adapter import Facts
from services.postprocess.parsers.isolated.host import DIED, START_TIMEOUT_S, TOO_SLOW, ParserHost
from services.postprocess.parsers.isolated.remote import RemoteStream

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
_SERVICES = Path(__file__).resolve().parents[3]
# Of this project the process sees only `services`; every package it needs is its own interpreter's.
_BOOTSTRAP = (
    "import sys, types; services = types.ModuleType('services'); services.__path__ = [sys.argv[1]]; "
    "sys.modules['services'] = services; from services.postprocess.parsers.engines.host import main; main(sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Parsers of one model: where its files are, and bare names, empty for none."""

    source: str
    tool: str
    reasoning: str


def pair_of(source: str, names: ParserNames) -> Pair:
    """The pair that a stream needs."""
    return Pair(source, bare(names.tool), bare(names.reasoning))


class EngineHost(ParserHost):
    """The processes of one engine's parsers.

    One process has the engine loaded and never parses; a copy of it does. A copy that raises, loops, grows or dies is
    replaced by the next one within milliseconds, and the streams that are not to blame go on where they were. When the
    last model that they were loaded for has gone, both end; the next model starts them again.

    Args:
        engine: its name.
        python: an interpreter that has its package; empty for this one.
        time_s, memory_mb, on_death: see ParserHost.
    """

    def __init__(
        self,
        engine: str,
        python: str,
        time_s: float,
        memory_mb: int,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        super().__init__(engine, time_s, memory_mb, on_death)
        self._python = python or sys.executable
        self._control: socket.socket | None = None
        self._pid = 0
        self._known: dict[Pair, Facts | str] = {}
        self._to_load: dict[Pair, asyncio.Future[None]] = {}
        self._released: set[str] = set()  # sources of models that have gone

    @property
    def pid(self) -> int:
        """Of the copy that parses now; 0 for none."""
        return self._pid

    def facts(self, pair: Pair) -> Facts | None:
        """What is known about a pair of parsers, None before it is loaded.

        Raises:
            SluiceError: FAILED_PRECONDITION when the engine cannot use them with this model.
        """
        found = self._known.get(pair)
        if isinstance(found, str):
            names = " and ".join(filter(None, (pair.tool, pair.reasoning)))
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"{self.name} cannot use its parser {names} with this model: {found.rstrip('.')}.",
                param="tool_parser" if pair.tool else "reasoning_parser",
                code="parser_unusable",
            )
        return found

    async def prepare(self, pair: Pair) -> Facts:
        """Loads what a pair of parsers needs; SluiceError as `facts`, UNAVAILABLE when it does not come in time."""
        self._check(pair)
        self._released.discard(pair.source)
        while (found := self.facts(pair)) is None:
            waiting = self._to_load.get(pair)
            if waiting is None:
                waiting = self._to_load[pair] = asyncio.get_running_loop().create_future()
                self._news.set()
            try:
                await asyncio.wait_for(asyncio.shield(waiting), LOAD_TIMEOUT_S)
            except TimeoutError:
                raise unavailable(f"The parsers of {self.name} do not load.", code="parser_loading") from None
        return found

    def _check(self, pair: Pair) -> None:
        for kind, name in (("tool", pair.tool), ("reasoning", pair.reasoning)):
            known = ENGINES[self.name].of(kind)
            if name and name not in known:
                near = ", ".join(nearest(name, known))
                raise SluiceError(
                    ErrorKind.INVALID_ARGUMENT,
                    f"{self.name} has no {kind} parser {quoted(name)}; nearest: {near or 'none'}.",
                )

    def open(self, stream: Stream, names: ParserNames, context: ParserContext) -> RemoteStream:
        """See ParserHost; the stream's pair must have been prepared."""
        remote = RemoteStream(next(self._numbers), stream, names, context, self, tokens=True)
        self._streams[remote.number] = remote
        return remote

    def release(self, source: str) -> None:
        """Forgets the parsers of a model that has gone, once its streams have ended."""
        if any(pair.source == source for pair in self._known):
            self._released.add(source)
            self._news.set()

    def forget(self, stream: RemoteStream) -> None:
        """See remote.Host."""
        super().forget(stream)
        if self._released:
            self._news.set()

    def _batch(self) -> tuple[list[list[Any]], dict[int, RemoteStream]]:
        special = [["load", pair.source, pair.tool, pair.reasoning] for pair in self._to_load]
        if not special and self._released:
            parsed = {stream.context.source for stream in self._streams.values()}
            special = [["unload", source] for source in sorted(self._released - parsed)]
        if not special:
            return super()._batch()
        # Loading takes long: a message of its own, with more time.
        if self._changed or self._closed or self._released:
            self._news.set()
        return special, {}

    async def _exchange(self, operations: list[list[Any]], asked: dict[int, RemoteStream]) -> str:
        if operations[0][0] == "unload":
            return await self._unload([source for _, source in operations])
        if operations[0][0] != "load":
            return await super()._exchange(operations, asked)
        pairs = [Pair(*fields) for _, *fields in operations]
        try:
            answers = await self._ask(operations, LOAD_TIMEOUT_S)
        except (TimeoutError, EOFError, ConnectionError, ValueError) as error:
            for pair in pairs:
                waiting = self._to_load.pop(pair)
                if not waiting.done():
                    waiting.set_exception(unavailable(f"The parsers of {self.name} cannot be loaded now."))
                    waiting.exception()  # seen here, in case nobody waits any more
            return TOO_SLOW if isinstance(error, TimeoutError) else DIED
        for pair, answer in zip(pairs, answers, strict=True):
            self._learn(pair, answer)
        return ""

    async def _unload(self, sources: list[str]) -> str:
        """Forgets what was loaded for models that have gone; returns as `_exchange`."""
        self._released.difference_update(sources)
        self._known = {pair: found for pair, found in self._known.items() if pair.source not in sources}
        if not self._known and not self._streams:
            await self._kill()
        if self._writer is None:
            return ""
        try:
            await self._ask([["unload", source] for source in sources], LOAD_TIMEOUT_S)
        except (TimeoutError, EOFError, ConnectionError, ValueError) as error:
            return TOO_SLOW if isinstance(error, TimeoutError) else DIED
        return ""

    def _learn(self, pair: Pair, answer: dict[str, Any]) -> None:
        self._known[pair] = answer["error"] if "error" in answer else Facts(**answer)
        waiting = self._to_load.pop(pair, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def _start(self) -> None:
        if self._process is None or self._process.returncode is not None:
            await self._start_loader()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        pairs = [pair for pair, found in self._known.items() if isinstance(found, Facts)]
        request = json.dumps([[pair.source, pair.tool, pair.reasoning] for pair in pairs])
        try:
            with theirs:
                socket.send_fds(self._control, [request.encode()], [theirs.fileno()])
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            hello = await asyncio.wait_for(self._read(), START_TIMEOUT_S)
        except TimeoutError:
            await self._kill()
            said = f"The parsers of {self.name} did not start within {START_TIMEOUT_S:.0f} s."
            raise unavailable(said) from None
        except (EOFError, ValueError, OSError):
            await self._kill()
            raise unavailable(f"The parsers of {self.name} do not start; the log above says why.") from None
        if error := hello.get("error"):
            await self._kill()
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, error, code="missing_extra")
        self._pid = hello["pid"]
        self._compare(hello)
        for pair, answer in zip(pairs, hello["facts"], strict=True):
            self._learn(pair, answer)

    def _compare(self, hello: dict[str, Any]) -> None:
        shipped = ENGINES[self.name]
        if hello["version"].partition("+")[0] != shipped.version:
            log.warning(
                "this version of the engine's parsers is not the one that is tested",
                extra={"engine": self.name, "version": hello["version"], "tested": shipped.version},
            )

    async def _start_loader(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), self._file.fileno())
            self._process = await asyncio.create_subprocess_exec(
                *(self._python, "-P", "-c", _BOOTSTRAP, str(_SERVICES), self.name),
                *(*map(str, fds), str(self._memory_mb)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
            )

    async def _clear(self) -> None:
        """Ends the copy; the loader stays, and begins the next one."""
        if self._writer is not None:
            self._writer.close()
        pid, self._pid, self._reader, self._writer = self._pid, 0, None, None
        if pid and self._process is not None and self._process.returncode is None:
            # The loader waits for it later, so the number is still its own.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _kill(self) -> None:
        await self._clear()
        process, self._process = self._process, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if process is None:
            return
        if process.returncode is None:
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
