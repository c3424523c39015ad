"""Creates streams: plain ones, and ones with a parser in this or another process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.common.base.errors import ErrorKind, SluiceError
from services.common.child_rpc.child import ChildLimits
from services.postprocess.detokenize.stream import Finish, FinishReason, Limits, Stream, StreamOptions
from services.postprocess.detokenize.vocabulary import ParserNames, Vocabulary
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.engine_names import engine_of
from services.postprocess.parsers.events import Content, Degraded, Event, merge
from services.postprocess.parsers.registry import ParserRegistry, build, markers_of
from services.postprocess.parsers.remote import RemoteStream, pair_of
from services.postprocess.parsers.watchdog import WATCH
from services.postprocess.streams.parsed import ParsedStream
from services.postprocess.streams.parser_hosts import EngineParsers, RemoteParserHost, custom_host, engine_host
from services.postprocess.streams.parser_selection import ParserSelection, plan_of

log = logging.getLogger(__name__)

NO_PARSERS = ParserNames()

INLINE_TOKENS = 4_096
"""Tokens fed to a stream at once; more would delay other streams."""

AnyParsed = ParsedStream | RemoteStream
AnyStream = Stream | AnyParsed


MAX_PARSER_S = 2.0
"""Seconds that a parser runs for one stream's text of a message; then its stream continues as plain text."""
MAX_PARSER_MEMORY_MB = 512
"""MiB that a parser's process allocates after its start; with more, it is ended."""
PARSER_LIMITS = ChildLimits(MAX_PARSER_S, MAX_PARSER_MEMORY_MB)


@dataclass(frozen=True, slots=True)
class CustomParsers:
    """Custom and engine parsers, and their resource limits.

    Attributes:
        names: custom parsers, `module:Class`.
        limits: of each process; the time is that of one operation of a batch.
        engines: engines whose parsers are started with the service, and their interpreters; empty: this one.
        later: the same for engines whose process starts with the first model or stream that needs it.
    """

    names: Sequence[str] = ()
    limits: ChildLimits = PARSER_LIMITS
    engines: Mapping[str, str] = field(default_factory=dict)
    later: Mapping[str, str] = field(default_factory=dict)


class StreamFactory:
    """Creates the streams of this process.

    Args:
        limits: bounds of stream options.
        own: custom and engine parsers.
        on_death: called if a task that manages one of their processes fails.
    """

    def __init__(
        self,
        limits: Limits,
        own: CustomParsers | None = None,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        own = own or CustomParsers()
        self._limits = limits
        self._time_s = own.limits.call_s
        engines = {**own.engines, **own.later}
        self._registry = ParserRegistry(own.names, engines)
        self._engines = {
            engine: engine_host(engine, python, own.limits, on_death) for engine, python in engines.items()
        }
        self._not_started = {engine: asyncio.Lock() for engine in own.later}
        self._hosts = {name: custom_host(name, own.limits, on_death) for name in own.names}

    async def start(self) -> None:
        """Starts the processes, except of later engines; raises SluiceError if a custom parser cannot be imported."""
        WATCH.start(self._time_s)
        engines = [host for name, host in self._engines.items() if name not in self._not_started]
        await asyncio.gather(*(host.start() for host in (*self._hosts.values(), *engines)))

    async def close(self) -> None:
        """Ends the processes."""
        WATCH.stop()
        await asyncio.gather(*(host.close() for host in (*self._hosts.values(), *self._engines.values())))

    def plan(self, options: StreamOptions, vocabulary: Vocabulary, identity: str) -> ParserSelection:
        return plan_of(options, vocabulary, self._registry, self._limits, identity)

    def ready(self, plan: ParserSelection) -> bool:
        """Returns whether `begin` can be called without `prepare`."""
        engine = self._engine(plan.names)
        return engine is None or engine.facts(pair_of(plan.context.source, plan.names)) is not None

    async def prepare(self, plan: ParserSelection) -> None:
        """Loads the engine parsers of a selection; raises SluiceError on failure or timeout."""
        engine = self._engine(plan.names)
        if engine is not None:
            await self._start_later(engine)
            await engine.prepare(pair_of(plan.context.source, plan.names))

    async def prepare_for(self, vocabulary: Vocabulary) -> None:
        """Loads the parsers that `auto` selects for a model, with and without tools.

        Falls back to the built-in parsers, which marks the streams, if preferred engine parsers cannot handle the model
        or the engine's package is absent or of another version.

        Raises:
            SluiceError: explicitly configured parsers cannot handle the model.
        """
        names = vocabulary.parsers
        try:
            for pair in {names, replace(names, tool="")} - {NO_PARSERS}:
                await self.prepare(ParserSelection(pair, ParserContext(source=vocabulary.source)))
        except SluiceError as error:
            if error.kind is not ErrorKind.FAILED_PRECONDITION or vocabulary.built_in is None:
                raise
            vocabulary.parsers, vocabulary.replaces_engine = vocabulary.built_in, True
            log.warning("using the built-in parsers: %s", error.message, extra={"source": vocabulary.source})

    def release(self, source: str) -> None:
        """Unloads engine parsers of the model with these files once its streams have ended."""
        for host in self._engines.values():
            host.release(source)

    async def _start_later(self, engine: EngineParsers) -> None:
        """Starts the process of an engine that was not started with the service."""
        if (lock := self._not_started.get(engine.name)) is None:
            return
        async with lock:
            if engine.name in self._not_started:
                await engine.start()
                del self._not_started[engine.name]

    def _engine(self, names: ParserNames) -> EngineParsers | None:
        return self._engines.get(engine_of(names.tool) or engine_of(names.reasoning)) if self._engines else None

    def begin(self, options: StreamOptions, vocabulary: Vocabulary, plan: ParserSelection) -> AnyStream:
        """Creates a stream, with a parser if the plan has one."""
        if not plan.names.tool and not plan.names.reasoning:
            return Stream(options, vocabulary, self._limits)
        return self.parsed(options, vocabulary, plan)

    def parsed(self, options: StreamOptions, vocabulary: Vocabulary, plan: ParserSelection) -> AnyParsed:
        """Creates a stream with a parser in this or another process."""
        engine = self._engine(plan.names)
        if engine is not None:
            facts = engine.facts(pair_of(plan.context.source, plan.names))
            assert facts is not None, "call prepare first"
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

    def host(self, name: str) -> RemoteParserHost | None:
        """Returns the host of a custom or engine parser; None for a built-in one."""
        return self._hosts.get(name) or self._engines.get(engine_of(name))

    def _host(self, names: ParserNames) -> RemoteParserHost | None:
        return self._hosts.get(names.tool) or self._hosts.get(names.reasoning)

    async def parse(
        self,
        tokens: Sequence[int],
        options: StreamOptions,
        vocabulary: Vocabulary,
        reason: FinishReason,
        identity: str,
    ) -> tuple[list[Event], Finish]:
        """Parses a complete token sequence; returns its events and finish."""
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
    """Feeds tokens in portions, so that other streams are not delayed; returns the text of a plain stream."""
    texts = []
    for start in range(0, len(tokens), INLINE_TOKENS):
        if start:
            await asyncio.sleep(0)
        texts.append(stream.feed(tokens[start : start + INLINE_TOKENS]) or "")
    return "".join(texts)


async def _ended(stream: AnyParsed, reason: FinishReason) -> list[Event]:
    """Ends a stream; returns all its events once it has finished."""
    if isinstance(stream, RemoteStream):
        changed = asyncio.Event()
        stream.changed = changed.set
        stream.end(reason)
        while stream.finish is None:
            await changed.wait()
            changed.clear()
    else:
        stream.end(reason)
    return stream.take_events()


def parsing(streams: Iterable[AnyParsed]) -> bool:
    """Returns whether a remote parser has not finished an ended stream yet."""
    return any(isinstance(stream, RemoteStream) and stream.ending and not stream.finish for stream in streams)
