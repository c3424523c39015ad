"""Runs an engine's parsers in a separate process and interpreter; see `engines.host` for the other side."""

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
# Only `services` is importable from this project; all other packages come from the process's own interpreter.
_BOOTSTRAP = (
    "import sys, types; services = types.ModuleType('services'); services.__path__ = [sys.argv[1]]; "
    "sys.modules['services'] = services; from services.postprocess.parsers.engines.host import main; main(sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Parsers of one model: location of its files, and names without the engine prefix, empty for none."""

    source: str
    tool: str
    reasoning: str


def pair_of(source: str, names: ParserNames) -> Pair:
    """Returns the pair that a stream needs."""
    return Pair(source, bare(names.tool), bare(names.reasoning))


class EngineHost(ParserHost):
    """Manages the processes of one engine's parsers.

    A loader process has imported the engine and never parses; a fork of it does. A fork that raises, hangs, exceeds its
    memory or dies is replaced within milliseconds, and the streams that did not cause it continue. Both processes end
    when the last model is released; the next model starts them again.

    Args:
        engine: its name.
        python: an interpreter that has its package; empty: this one.
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
        self._released: set[str] = set()  # sources of removed models

    @property
    def pid(self) -> int:
        """Process id of the current fork; 0 for none."""
        return self._pid

    def facts(self, pair: Pair) -> Facts | None:
        """Returns the facts of a pair of parsers; None before it is loaded.

        Raises:
            SluiceError: FAILED_PRECONDITION if the engine cannot use them with this model.
        """
        found = self._known.get(pair)
        if isinstance(found, str):
            names = " and ".join(filter(None, (pair.tool, pair.reasoning)))
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"{self.name} cannot use its parser {names} with this model ({found.rstrip('.')}); choose another.",
                param="tool_parser" if pair.tool else "reasoning_parser",
                code="parser_unusable",
            )
        return found

    async def prepare(self, pair: Pair) -> Facts:
        """Loads a pair of parsers; raises SluiceError as `facts`, or UNAVAILABLE after a timeout."""
        self._check(pair)
        self._released.discard(pair.source)
        while (found := self.facts(pair)) is None:
            loaded = self._to_load.get(pair)
            if loaded is None:
                loaded = self._to_load[pair] = asyncio.get_running_loop().create_future()
                self._pending.set()
            try:
                await asyncio.wait_for(asyncio.shield(loaded), LOAD_TIMEOUT_S)
            except TimeoutError:
                raise unavailable(
                    f"The parsers of {self.name} did not load within {LOAD_TIMEOUT_S:.0f} s; retry later.",
                    code="parser_loading",
                ) from None
        return found

    def _check(self, pair: Pair) -> None:
        for kind, name in (("tool", pair.tool), ("reasoning", pair.reasoning)):
            known = ENGINES[self.name].of(kind)
            if name and name not in known:
                near = ", ".join(nearest(name, known))
                raise SluiceError(
                    ErrorKind.INVALID_ARGUMENT,
                    f"{self.name} has no {kind} parser {quoted(name)}; similar names: {near or 'none'}.",
                )

    def open(self, stream: Stream, names: ParserNames, context: ParserContext) -> RemoteStream:
        """See ParserHost; the stream's pair must have been prepared."""
        remote = RemoteStream(next(self._numbers), stream, names, context, self, tokens=True)
        self._streams[remote.number] = remote
        return remote

    def release(self, source: str) -> None:
        """Unloads the parsers of a removed model once its streams have ended."""
        if any(pair.source == source for pair in self._known):
            self._released.add(source)
            self._pending.set()

    def forget(self, stream: RemoteStream) -> None:
        """See remote.Host."""
        super().forget(stream)
        if self._released:
            self._pending.set()

    def _batch(self) -> tuple[list[list[Any]], dict[int, RemoteStream]]:
        special = [["load", pair.source, pair.tool, pair.reasoning] for pair in self._to_load]
        if not special and self._released:
            parsed = {stream.context.source for stream in self._streams.values()}
            special = [["unload", source] for source in sorted(self._released - parsed)]
        if not special:
            return super()._batch()
        # Loading takes long, so it is sent as a separate message with a longer timeout.
        if self._changed or self._closed or self._released:
            self._pending.set()
        return special, {}

    async def _run_batch(self, operations: list[list[Any]], streams: dict[int, RemoteStream]) -> str:
        if operations[0][0] == "unload":
            return await self._unload([source for _, source in operations])
        if operations[0][0] != "load":
            return await super()._run_batch(operations, streams)
        pairs = [Pair(*fields) for _, *fields in operations]
        try:
            results = await self._call(operations, LOAD_TIMEOUT_S)
        except (TimeoutError, EOFError, ConnectionError, ValueError) as error:
            for pair in pairs:
                loaded = self._to_load.pop(pair)
                if not loaded.done():
                    loaded.set_exception(unavailable(f"The parsers of {self.name} cannot be loaded now; retry later."))
                    loaded.exception()  # marks the exception as retrieved in case no caller waits any more
            return TOO_SLOW if isinstance(error, TimeoutError) else DIED
        for pair, result in zip(pairs, results, strict=True):
            self._set_facts(pair, result)
        return ""

    async def _unload(self, sources: list[str]) -> str:
        """Unloads removed models; returns like `_run_batch`."""
        self._released.difference_update(sources)
        self._known = {pair: found for pair, found in self._known.items() if pair.source not in sources}
        if not self._known and not self._streams:
            await self._kill()
        if self._writer is None:
            return ""
        try:
            await self._call([["unload", source] for source in sources], LOAD_TIMEOUT_S)
        except (TimeoutError, EOFError, ConnectionError, ValueError) as error:
            return TOO_SLOW if isinstance(error, TimeoutError) else DIED
        return ""

    def _set_facts(self, pair: Pair, result: dict[str, Any]) -> None:
        self._known[pair] = result["error"] if "error" in result else Facts(**result)
        loaded = self._to_load.pop(pair, None)
        if loaded is not None and not loaded.done():
            loaded.set_result(None)

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
            message = f"The parsers of {self.name} did not start within {START_TIMEOUT_S:.0f} s; retry later."
            raise unavailable(message) from None
        except (EOFError, ValueError, OSError):
            await self._kill()
            raise unavailable(f"The parsers of {self.name} do not start; see the log above.") from None
        if error := hello.get("error"):
            await self._kill()
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, error, code="missing_extra")
        self._pid = hello["pid"]
        self._check_version(hello)
        for pair, result in zip(pairs, hello["facts"], strict=True):
            self._set_facts(pair, result)

    def _check_version(self, hello: dict[str, Any]) -> None:
        shipped = ENGINES[self.name]
        if hello["version"].partition("+")[0] != shipped.version:
            log.warning(
                "untested version of the engine's parsers",
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
        """Kills the fork; the loader stays and starts the next one."""
        if self._writer is not None:
            self._writer.close()
        pid, self._pid, self._reader, self._writer = self._pid, 0, None, None
        if pid and self._process is not None and self._process.returncode is None:
            # The loader has not called waitpid yet, so the pid cannot have been reused.
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
            with suppress(ProcessLookupError):  # it has just exited
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
