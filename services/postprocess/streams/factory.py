"""Begins streams: plain ones, ones with a parser in this process, ones with a parser in another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.common.errors import ErrorKind, SluiceError
from services.postprocess.detokenize.stream import Finish, FinishReason, Limits, Stream, StreamOptions
from services.postprocess.detokenize.vocabulary import ParserNames, Vocabulary
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.engines import engine_of
from services.postprocess.parsers.events import Content, Degraded, Event, merge
from services.postprocess.parsers.isolated.engine_host import EngineHost, pair_of
from services.postprocess.parsers.isolated.host import ParserHost
from services.postprocess.parsers.isolated.remote import RemoteStream
from services.postprocess.parsers.registry import Registry, build, markers_of
from services.postprocess.parsers.watchdog import WATCH
from services.postprocess.streams.parsed import ParsedStream
from services.postprocess.streams.parser_selection import ParserSelection, plan_of

log = logging.getLogger(__name__)

NO_PARSERS = ParserNames()

INLINE_TOKENS = 4_096
"""Tokens that one stream is given at once; more of them would keep the others waiting."""

AnyParsed = ParsedStream | RemoteStream
AnyStream = Stream | AnyParsed


@dataclass(frozen=True, slots=True)
class CustomParsers:
    """The user's own parsers and what they may use.

    Attributes:
        names: `module:Class` each.
        time_s: for one stream's share of a batch.
        memory_mb: by which each process may grow.
        engines: whose own parsers run here, with the interpreter of each; empty for this one.
        later: the same for engines whose process starts with the first model or stream that needs it.
    """

    names: Sequence[str] = ()
    time_s: float = 2.0
    memory_mb: int = 512
    engines: Mapping[str, str] = field(default_factory=dict)
    later: Mapping[str, str] = field(default_factory=dict)


class StreamFactory:
    """What begins streams in this process.

    Args:
        limits: what options may ask for.
        own: the user's own parsers.
        on_death: a task that looks after one of their processes failed.
    """

    def __init__(
        self,
        limits: Limits,
        own: CustomParsers | None = None,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        own = own or CustomParsers()
        self._limits = limits
        self._time_s = own.time_s
        engines = {**own.engines, **own.later}
        self._registry = Registry(own.names, engines)
        self._engines = {
            engine: EngineHost(engine, python, own.time_s, own.memory_mb, on_death)
            for engine, python in engines.items()
        }
        self._not_started = {engine: asyncio.Lock() for engine in own.later}
        self._hosts = {name: ParserHost(name, own.time_s, own.memory_mb, on_death) for name in own.names}

    async def start(self) -> None:
        """Starts the processes but those of later engines; SluiceError when one of the user's parsers cannot be
        imported."""
        WATCH.start(self._time_s)
        engines = [host for name, host in self._engines.items() if name not in self._not_started]
        await asyncio.gather(*(host.start() for host in (*self._hosts.values(), *engines)))

    async def close(self) -> None:
        """Ends the processes."""
        WATCH.stop()
        await asyncio.gather(*(host.close() for host in (*self._hosts.values(), *self._engines.values())))

    def plan(self, options: StreamOptions, vocabulary: Vocabulary, identity: str) -> ParserSelection:
        """See plan_of."""
        return plan_of(options, vocabulary, self._registry, self._limits, identity)

    def ready(self, plan: ParserSelection) -> bool:
        """Whether `begin` can be called now; `prepare` makes it so."""
        engine = self._engine(plan.names)
        return engine is None or engine.facts(pair_of(plan.context.source, plan.names)) is not None

    async def prepare(self, plan: ParserSelection) -> None:
        """Loads what an engine's parsers need; SluiceError when it cannot be, or not in time."""
        engine = self._engine(plan.names)
        if engine is not None:
            await self._start_later(engine)
            await engine.prepare(pair_of(plan.context.source, plan.names))

    async def prepare_for(self, vocabulary: Vocabulary) -> None:
        """Loads what `auto` means for a model, with tools and without.

        An engine's parsers that are only preferred and cannot work with the model give way to the built-in ones.

        Raises:
            SluiceError: parsers that were asked for cannot work; the engine's package is missing.
        """
        names = vocabulary.parsers
        try:
            for pair in {names, replace(names, tool="")} - {NO_PARSERS}:
                await self.prepare(ParserSelection(pair, ParserContext(source=vocabulary.source)))
        except SluiceError as error:
            missing = error.kind is not ErrorKind.FAILED_PRECONDITION or error.code == "missing_extra"
            if missing or vocabulary.built_in is None:
                raise
            vocabulary.parsers = vocabulary.built_in
            log.warning("the built-in parsers are used: %s", error.message, extra={"source": vocabulary.source})

    def release(self, source: str) -> None:
        """Ends what the engines' parsers keep for the model with these files, once its streams have ended."""
        for host in self._engines.values():
            host.release(source)

    async def _start_later(self, engine: EngineHost) -> None:
        """Starts the process of an engine that was not started with the service; does nothing for any other."""
        if (lock := self._not_started.get(engine.name)) is None:
            return
        async with lock:
            if engine.name in self._not_started:
                await engine.start()
                del self._not_started[engine.name]

    def _engine(self, names: ParserNames) -> EngineHost | None:
        return self._engines.get(engine_of(names.tool) or engine_of(names.reasoning))

    def begin(self, options: StreamOptions, vocabulary: Vocabulary, plan: ParserSelection) -> AnyStream:
        """A stream, with a parser where the plan has one."""
        if plan.names == NO_PARSERS:
            return Stream(options, vocabulary, self._limits)
        return self.parsed(options, vocabulary, plan)

    def parsed(self, options: StreamOptions, vocabulary: Vocabulary, plan: ParserSelection) -> AnyParsed:
        """A stream with a parser, wherever that one runs."""
        engine = self._engine(plan.names)
        if engine is not None:
            facts = engine.facts(pair_of(plan.context.source, plan.names))
            assert facts is not None, "prepare comes first"
            if facts.keeps_special if plan.context.tools else facts.keeps_special_always:
                options = replace(options, skip_special_tokens=False)
            return engine.open(Stream(options, vocabulary, self._limits), plan.names, plan.context)
        host = self._host(plan.names)
        if host is None:
            stream = Stream(options, vocabulary, self._limits, markers_of(plan.names))
            return ParsedStream(stream, build(plan.names, plan.context), plan.context.identity)
        built_in = ParserNames(
            "" if plan.names.tool in self._hosts else plan.names.tool,
            "" if plan.names.reasoning in self._hosts else plan.names.reasoning,
        )
        markers = host.markers | markers_of(built_in)
        return host.open(Stream(options, vocabulary, self._limits, markers), plan.names, plan.context)

    def host(self, name: str) -> ParserHost | None:
        """Where an own parser or an engine's runs; None for a name that is none of these."""
        return self._hosts.get(name) or self._engines.get(engine_of(name))

    def _host(self, names: ParserNames) -> ParserHost | None:
        return self._hosts.get(names.tool) or self._hosts.get(names.reasoning)

    async def parse(
        self,
        tokens: Sequence[int],
        options: StreamOptions,
        vocabulary: Vocabulary,
        reason: FinishReason,
        identity: str,
    ) -> tuple[list[Event], Finish]:
        """A whole token sequence at once: what is in it and how it ended."""
        plan = self.plan(options, vocabulary, identity)
        await self.prepare(plan)
        degraded: list[Event] = [Degraded(plan.degraded)] if plan.degraded else []
        stream = self.begin(options, vocabulary, plan)
        try:
            text = await fed(stream, tokens)
            if isinstance(stream, Stream):
                events: list[Event] = [Content(text + stream.end(reason))]
            else:
                events = await _ended(stream, reason)
        finally:
            stream.close()
        assert stream.finish is not None
        return merge([*degraded, *events]), stream.finish


async def fed(stream: AnyStream, tokens: Sequence[int]) -> str:
    """Gives a stream its tokens, a part at a time, so that others do not wait; a plain one's text."""
    parts = []
    for start in range(0, len(tokens), INLINE_TOKENS):
        if start:
            await asyncio.sleep(0)
        parts.append(stream.feed(tokens[start : start + INLINE_TOKENS]) or "")
    return "".join(parts)


async def _ended(stream: AnyParsed, reason: FinishReason) -> list[Event]:
    """Ends a stream; all it said, once it has said everything."""
    if isinstance(stream, RemoteStream):
        news = asyncio.Event()
        stream.changed = news.set
        stream.end(reason)
        while stream.finish is None:
            await news.wait()
            news.clear()
    else:
        stream.end(reason)
    return stream.take_events()


def waiting(streams: Iterable[AnyParsed]) -> bool:
    """Whether one of them has ended and its parser has not said everything yet."""
    return any(isinstance(stream, RemoteStream) and stream.ending and not stream.finish for stream in streams)
