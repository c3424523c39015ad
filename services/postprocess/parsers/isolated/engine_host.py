"""Runs an engine's parsers in a separate process and interpreter; see `engines.host` for the other side."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, quoted, unavailable
from services.common.child_rpc.child import ChildLimits
from services.common.child_rpc.fork_server import ForkServer
from services.common.child_rpc.process import engine_command
from services.common.packages.engines import TESTED_VERSIONS, is_tested
from services.postprocess.parsers.engine_names import ENGINES, nearest
from services.postprocess.parsers.engines.adapter import Facts
from services.postprocess.parsers.isolated.host import DIED, MAX_FRAME_BYTES, START_TIMEOUT_S, TOO_SLOW, ParserHost
from services.postprocess.parsers.remote import ParserPair, RemoteStream

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0


class EngineHost(ParserHost):
    """Manages the processes of one engine's parsers.

    A fork server has imported the engine and never parses; a fork of it does. A fork that raises, hangs, exceeds its
    memory or dies is replaced within milliseconds, and the streams that did not cause it continue. Both processes end
    when the last model is released; the next model starts them again.

    Args:
        engine: its name.
        python: an interpreter that has its package; empty: this one.
        limits, on_death: see ParserHost.
    """

    with_tokens = True

    def __init__(
        self,
        engine: str,
        python: str,
        limits: ChildLimits,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        super().__init__(engine, limits, on_death)
        module, descriptor = "services.postprocess.parsers.engines.host", self._progress.descriptor
        self._server = ForkServer(
            lambda control: engine_command(python, module, engine, control, descriptor, limits),
            MAX_FRAME_BYTES,
            START_TIMEOUT_S,
            single=True,
            environment={**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
            descriptors=[descriptor],
        )
        self._known: dict[ParserPair, Facts | str] = {}
        self._loading: dict[ParserPair, asyncio.Task[SluiceError | None]] = {}
        self._released: set[str] = set()  # sources of removed models
        self._unusable: SluiceError | None = None  # the package, which does not change while this process runs

    def facts(self, pair: ParserPair) -> Facts | None:
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

    async def prepare(self, pair: ParserPair) -> Facts:
        """Loads a pair of parsers; raises SluiceError as `facts`, or UNAVAILABLE after a timeout."""
        self._check(pair)
        self._released.discard(pair.source)
        while (found := self.facts(pair)) is None:
            loading = self._loading.get(pair)
            if loading is None:
                loading = self._loading[pair] = self._tasks.spawn(self._load(pair), f"loading parsers of {self.name}")
            try:
                async with asyncio.timeout(LOAD_TIMEOUT_S):
                    error = await asyncio.shield(loading)
            except TimeoutError:
                raise unavailable(
                    f"The parsers of {self.name} did not load within {LOAD_TIMEOUT_S:.0f} s; retry later.",
                    code="parser_loading",
                ) from None
            if error is not None:
                raise error
        return found

    def _check(self, pair: ParserPair) -> None:
        for kind, name in (("tool", pair.tool), ("reasoning", pair.reasoning)):
            known = ENGINES[self.name].of(kind)
            if name and name not in known:
                near = ", ".join(nearest(name, known))
                raise SluiceError(
                    ErrorKind.INVALID_ARGUMENT,
                    f"{self.name} has no {kind} parser {quoted(name)}; similar names: {near or 'none'}.",
                )

    def release(self, source: str) -> None:
        """Unloads the parsers of a removed model once its streams have ended."""
        if any(pair.source == source for pair in self._known):
            self._released.add(source)
            self._unload_unused()

    def forget(self, stream: RemoteStream) -> None:
        super().forget(stream)
        self._unload_unused()

    def _unload_unused(self) -> None:
        sources = self._released - {stream.context.source for stream in self._streams.values()}
        if sources:
            self._released -= sources
            self._tasks.spawn(self._unload(sources), f"unloading parsers of {self.name}")

    async def _load(self, pair: ParserPair) -> SluiceError | None:
        """Loads a pair of parsers; returns an error if they may load later."""
        try:
            async with self._turn:
                (result,) = await self._manage([["load", pair.source, pair.tool, pair.reasoning]]) or (None,)
        finally:
            del self._loading[pair]
        if result is None:
            return unavailable(f"The parsers of {self.name} cannot be loaded now; retry later.")
        self._set_facts(pair, result)
        return None

    async def _unload(self, sources: set[str]) -> None:
        async with self._turn:
            used = {stream.context.source for stream in self._streams.values()}
            self._released |= sources & used
            sources -= used | {pair.source for pair in self._loading}
            self._known = {pair: found for pair, found in self._known.items() if pair.source not in sources}
            if not self._known and not self._streams:
                await self._kill()
            elif self._child is not None and sources:
                await self._manage([["unload", source] for source in sources])

    async def _manage(self, operations: list[list[str]]) -> list[Any] | None:
        """Runs operations that may take long; replaces the process and returns None if they fail."""
        try:
            results: list[Any] = await self._call(operations, LOAD_TIMEOUT_S)
        except (TimeoutError, EOFError, ConnectionError, ValueError) as error:
            await self._restart(TOO_SLOW if isinstance(error, TimeoutError) else DIED)
            return None
        self._deaths = 0
        return results

    def _set_facts(self, pair: ParserPair, result: dict[str, Any]) -> None:
        self._known[pair] = result["error"] if "error" in result else Facts(**result)

    async def _start(self) -> None:
        if self._unusable is not None:
            raise self._unusable
        await self._server.start()
        pairs = [pair for pair, found in self._known.items() if isinstance(found, Facts)]
        request = json.dumps([[pair.source, pair.tool, pair.reasoning] for pair in pairs])
        try:
            self._child, hello = await self._server.fork(request.encode())
        except TimeoutError:
            message = f"The parsers of {self.name} did not start within {START_TIMEOUT_S:.0f} s; retry later."
            raise unavailable(message) from None
        except (EOFError, ValueError, OSError):
            raise unavailable(f"The parsers of {self.name} do not start; see the log above.") from None
        if error := hello.get("error"):
            self._unusable = SluiceError(ErrorKind.FAILED_PRECONDITION, error, code=hello["code"])
            raise self._unusable
        self._check_version(hello["version"])
        for pair, result in zip(pairs, hello["facts"], strict=True):
            self._set_facts(pair, result)

    def _check_version(self, version: str) -> None:
        if not is_tested(self.name, version):
            log.warning(
                "untested version of the engine's parsers",
                extra={"engine": self.name, "version": version, "tested": TESTED_VERSIONS[self.name]},
            )

    async def _kill(self) -> None:
        await self._clear()
        await self._server.close()
