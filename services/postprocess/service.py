"""gRPC in front of the domain: translates messages, nothing else."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc

from services.common import telemetry
from services.common.errors import ErrorKind, SluiceError, internal, invalid
from services.common.grpc_errors import abort, answer, to_detail
from services.common.learning import Learning
from services.common.packing import pack_u32, unpack_u32
from services.common.runner import Stop
from services.common.server import GrpcServer
from services.common.session import BatchWriter, serve_session
from services.common.tokenizer_delivery import Learned
from services.postprocess.answers import Batch
from services.postprocess.library import VocabularyLibrary
from services.postprocess.metrics import Metrics
from services.postprocess.opening import Opener, OwnParsers
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Degraded, Event, Reasoning
from services.postprocess.resuming import Resume
from services.postprocess.session import PostSession, SessionLimits
from services.postprocess.settings import PostprocessSettings
from services.postprocess.stream import Finish, FinishReason, Limits, StreamOptions
from services.postprocess.token_texts import TokenTexts
from sluice.v1 import common_pb2, postprocess_pb2, postprocess_pb2_grpc

log = logging.getLogger(__name__)

NEWS_SPREADS_S = 1.0
"""How long a gateway may take to hear that this replica leaves."""

INLINE_TOKENS = 4_096
"""Tokens that are parsed on the event loop; more of them would keep the sessions waiting."""

ToolCallDelta = postprocess_pb2.ToolCallDelta
NOTHING = Content("")

SessionContext = grpc.aio.ServicerContext[postprocess_pb2.PostSessionRequest, postprocess_pb2.TextBatch]
PiecesContext = grpc.aio.ServicerContext[postprocess_pb2.TokenPiecesRequest, postprocess_pb2.TokenPiecesResponse]
ParseContext = grpc.aio.ServicerContext[postprocess_pb2.ParseRequest, postprocess_pb2.ParseResponse]


class PostprocessService(postprocess_pb2_grpc.PostprocessServicer):
    """`sluice.v1.Postprocess`.

    Args:
        library: the models.
        limits: what callers may ask for.
        opener: begins streams.
        on_death: a background task failed.
    """

    def __init__(
        self,
        library: VocabularyLibrary,
        limits: SessionLimits,
        opener: Opener,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._library = library
        self._limits = limits
        self._opener = opener
        self._on_death = on_death
        self._metrics = Metrics()
        self._sessions: set[PostSession] = set()
        self._leaving = False
        self._draining = False

    @property
    def sessions(self) -> int:
        """Sessions open now."""
        return len(self._sessions)

    def leave(self) -> None:
        """Tells every session that this replica leaves, so that callers move their streams while it still serves."""
        self._leaving = True
        for session in self._sessions:
            session.leave()

    def start_draining(self) -> None:
        """Sessions end as soon as their last stream has been answered."""
        self._draining = True
        for session in self._sessions:
            session.start_draining()

    async def Session(self, request_iterator: object, context: SessionContext) -> None:  # type: ignore[override]
        """See postprocess.proto."""
        writer = BatchWriter(lambda: to_text_batch(session.drain()), context.write)
        session = PostSession(self._library, self._limits, self._metrics, writer.wake, self._on_death, self._opener)

        def on_message(message: postprocess_pb2.PostSessionRequest) -> None:
            apply(session, message)
            writer.wake()

        self._sessions.add(session)
        if self._leaving:
            session.leave()
        if self._draining:
            session.start_draining()
        try:
            await _until_drained(session, serve_session(context, writer, on_message))
            await session.settle()
            while (batch := to_text_batch(session.drain())) is not None:
                await context.write(batch)
        except SluiceError as error:
            await abort(context, error)
        except Exception:
            log.exception("a session failed")
            await abort(context, internal("Unexpected failure; the service's log has the details."))
        finally:
            self._sessions.discard(session)
            await session.aclose()

    async def TokenPieces(
        self, request: postprocess_pb2.TokenPiecesRequest, context: PiecesContext
    ) -> postprocess_pb2.TokenPiecesResponse:
        """See postprocess.proto."""
        return await answer(context, self._token_pieces, request)

    async def _token_pieces(self, request: postprocess_pb2.TokenPiecesRequest) -> postprocess_pb2.TokenPiecesResponse:
        tokens = unpack_u32(request.token_ids)
        if len(tokens) > self._limits.max_message_tokens:
            raise SluiceError(ErrorKind.TOO_LARGE, f"{len(tokens)} tokens are too many.", param="token_ids")
        vocabulary = await self._library.get(request.model)
        pieces = vocabulary.pieces(tokens)
        return postprocess_pb2.TokenPiecesResponse(lengths=pack_u32(map(len, pieces)), pieces=b"".join(pieces))

    async def Parse(
        self, request: postprocess_pb2.ParseRequest, context: ParseContext
    ) -> postprocess_pb2.ParseResponse:
        """See postprocess.proto."""
        parent = telemetry.carrier_of_metadata(context.invocation_metadata())
        with telemetry.stage("postprocess.parse", parent, model=request.options.model):
            return await answer(context, self._parse, request)

    async def _parse(self, request: postprocess_pb2.ParseRequest) -> postprocess_pb2.ParseResponse:
        options = to_options(request.options)
        if options.token_texts:
            said = "Parse does not tell what tokens stand for; ask TokenPieces, or use a session."
            raise invalid(said, param="token_texts")
        tokens = unpack_u32(request.token_ids)
        if len(tokens) > self._limits.max_message_tokens:
            raise SluiceError(ErrorKind.TOO_LARGE, f"{len(tokens)} tokens are too many.", param="token_ids")
        vocabulary = await self._library.get(options.model)
        events, finish = await self._opener.parse(
            tokens,
            options,
            vocabulary,
            to_reason(request.finish_reason),
            secrets.token_hex(12),
            inline=len(tokens) <= INLINE_TOKENS,
        )
        if finish.error is not None:
            raise finish.error
        self._metrics.took(len(tokens))
        self._metrics.finished(finish)
        return to_response(events, finish)


async def _until_drained(session: PostSession, serving: Coroutine[Any, Any, None]) -> None:
    """Serves until the caller is done, or until a session that is being drained has nothing left."""
    tasks = {asyncio.ensure_future(serving), asyncio.ensure_future(session.drained.wait())}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def apply(session: PostSession, message: postprocess_pb2.PostSessionRequest) -> None:
    """Hands one message to its session; SluiceError when the session cannot go on."""
    for opening in message.opens:
        try:
            options = to_options(opening.options)
            resume = to_resume(opening.resume) if opening.HasField("resume") else None
        except SluiceError as error:
            session.refuse(opening.slot, error)
            continue
        session.open(opening.slot, opening.request_id, options, telemetry.carrier(opening.trace), resume)
    columns = message.tokens
    if columns.slots:
        session.feed(
            unpack_u32(columns.slots, "tokens.slots"),
            unpack_u32(columns.counts, "tokens.counts"),
            unpack_u32(columns.token_ids, "tokens.token_ids"),
        )
    for end in message.ends:
        stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
        session.end(end.slot, to_reason(end.finish_reason), stop_token_id)
    if message.closes:
        session.close(unpack_u32(message.closes, "closes"))


def to_options(message: postprocess_pb2.StreamOptions) -> StreamOptions:
    """Reads a stream's options; SluiceError for packed ids that are cut off."""
    return StreamOptions(
        model=message.model,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        stop=tuple(message.stop),
        include_stop_string=message.include_stop_string,
        stop_token_ids=frozenset(unpack_u32(message.stop_token_ids, "stop_token_ids")),
        eos_token_ids=frozenset(unpack_u32(message.eos_token_ids, "eos_token_ids")),
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        prompt_tail=unpack_u32(message.prompt_tail, "prompt_tail"),
        tool_parser=message.tool_parser,
        reasoning_parser=message.reasoning_parser,
        tools_json=message.tools_json,
        tool_choice_json=message.tool_choice_json,
        single_tool_call=message.single_tool_call,
        guided=message.guided,
        token_texts=message.token_texts,
        template_kwargs_json=message.chat_template_kwargs_json,
    )


def to_resume(message: postprocess_pb2.StreamResume) -> Resume:
    """Reads what became of a stream elsewhere; SluiceError for packed ids that are cut off."""
    return Resume(
        token_ids=unpack_u32(message.token_ids, "resume.token_ids"),
        text_sent=message.text_sent,
        reasoning_sent=message.reasoning_sent,
        calls={call.index: call.arguments_sent for call in message.calls},
        tokens_sent=message.tokens_sent,
    )


def to_response(events: list[Event], finish: Finish) -> postprocess_pb2.ParseResponse:
    """The wire form of a whole answer."""
    calls: dict[int, ToolCallDelta] = {}
    for event in events:
        if isinstance(event, CallStart):
            calls[event.call] = ToolCallDelta(index=event.call, id=event.id, name=event.name)
    for call, delta in calls.items():
        delta.arguments = "".join(e.text for e in events if isinstance(e, CallArguments) and e.call == call)
    message = to_finish(0, finish)
    message.degraded = ",".join(dict.fromkeys(event.reason for event in events if isinstance(event, Degraded)))
    return postprocess_pb2.ParseResponse(
        text="".join(event.text for event in events if isinstance(event, Content)),
        reasoning="".join(event.text for event in events if isinstance(event, Reasoning)),
        tool_calls=calls.values(),
        finish=message,
    )


def to_reason(number: int) -> FinishReason:
    """Reads a finish reason; one that this version does not know is as good as none."""
    try:
        return FinishReason(number)
    except ValueError:
        return FinishReason.UNSPECIFIED


def parts(events: list[Event]) -> Iterator[tuple[Event, list[ToolCallDelta]]]:
    """Events as they travel: neighbouring pieces of tool calls together, each beside the first of them."""
    calls: list[ToolCallDelta] = []
    for event in events:
        if isinstance(event, CallStart):
            delta = ToolCallDelta(index=event.call, id=event.id, name=event.name)
        elif isinstance(event, CallArguments):
            if calls and calls[-1].index == event.call:
                calls[-1].arguments += event.text
                continue
            delta = ToolCallDelta(index=event.call, arguments=event.text)
        else:
            if calls:
                yield NOTHING, calls
                calls = []
            yield event, []
            continue
        calls.append(delta)
    if calls:
        yield NOTHING, calls


def to_event(slot: int, event: Event, calls: list[ToolCallDelta]) -> postprocess_pb2.StreamEvent:
    """The wire form of what a parser found."""
    return postprocess_pb2.StreamEvent(
        slot=slot,
        text=event.text if isinstance(event, Content) else "",
        reasoning=event.text if isinstance(event, Reasoning) else "",
        degraded=event.reason if isinstance(event, Degraded) else "",
        tool_calls=calls,
    )


def to_tokens(tokens: TokenTexts) -> postprocess_pb2.TokenTexts:
    """The wire form of what tokens stand for."""
    return postprocess_pb2.TokenTexts(
        lengths=pack_u32(tokens.lengths), pieces=bytes(tokens.pieces), text_offsets=pack_u32(tokens.offsets)
    )


def to_finish(slot: int, finish: Finish) -> postprocess_pb2.StreamEvent:
    """The wire form of a stream's end."""
    return postprocess_pb2.StreamEvent(
        slot=slot,
        finish_reason=common_pb2.FinishReason.ValueType(int(finish.reason)),
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
        tokens_seen=finish.tokens_seen,
        reasoning_tokens=finish.reasoning_tokens,
        error=to_detail(finish.error) if finish.error is not None else None,
    )


def to_text_batch(batch: Batch | None) -> postprocess_pb2.TextBatch | None:
    """The wire form of what became ready together."""
    if batch is None:
        return None
    return postprocess_pb2.TextBatch(
        slots=pack_u32(batch.slots),
        text_lengths=pack_u32(batch.text_lengths),
        text=batch.text,
        events=[
            *[postprocess_pb2.StreamEvent(slot=slot, tokens=to_tokens(tokens)) for slot, tokens in batch.tokens],
            *[to_event(slot, *part) for slot, events in batch.events for part in parts(events)],
            *[to_finish(slot, finish) for slot, finish in batch.finishes],
        ],
        draining=batch.draining,
    )


def limits_of(settings: PostprocessSettings) -> SessionLimits:
    """The bounds that the settings give."""
    return SessionLimits(
        stream=Limits(settings.max_stop_strings, settings.max_stop_chars, settings.max_tools_kb << 10),
        max_streams=settings.max_streams,
        max_message_tokens=settings.max_message_tokens,
        max_row_tokens=settings.max_row_tokens,
        max_waiting_tokens=settings.max_waiting_tokens,
        max_backlog=settings.max_backlog,
    )


async def serve(settings: PostprocessSettings, stop: Stop) -> None:
    """Serves until `stop`: healthy once the models are loaded, drained within `drain_s` at the end."""
    library = VocabularyLibrary(
        settings.specs, settings.load_timeout_s, parsers=settings.parsers, native=settings.native_parsers
    )
    limits = limits_of(settings)
    own = OwnParsers(settings.own_parsers, settings.parser_time_s, settings.parser_memory_mb, settings.engines)
    opener = Opener(limits.stream, own, stop.fail)
    service = PostprocessService(library, limits, opener, stop.fail)
    server = GrpcServer(settings, postprocess_pb2.DESCRIPTOR)
    postprocess_pb2_grpc.add_PostprocessServicer_to_server(service, server.server)
    await server.start()
    learning = _learning(settings, library, stop) if settings.learns else None
    try:
        if learning is not None:
            await learning.start()
        await opener.start()
        if not settings.preload or await _before(stop, _loaded(library, opener)):
            await server.set_serving(True)
            await stop.wait()
            await server.set_serving(False)
            service.leave()
            if service.sessions:
                # Streams that are opened here before the news has spread are still welcome.
                await asyncio.sleep(min(NEWS_SPREADS_S, settings.drain_s))
    finally:
        service.start_draining()
        await server.stop(settings.drain_s)
        if learning is not None:
            await learning.close()
        await library.close()
        await opener.close()


def _learning(settings: PostprocessSettings, library: VocabularyLibrary, stop: Stop) -> Learning:
    async def learned(model: Learned) -> None:
        await library.add(model.spec)

    return Learning("postprocess", settings, {spec.name for spec in settings.specs}, library, learned, stop)


async def _loaded(library: VocabularyLibrary, opener: Opener) -> None:
    """All models, and the engines' parsers that `auto` means for them."""
    await asyncio.gather(*(opener.prepare_for(vocabulary) for vocabulary in await library.load_all()))


async def _before(stop: Stop, loading: Coroutine[Any, Any, None]) -> bool:
    """Whether `loading` was done before the process had to stop; raises what it raises."""
    task, stopping = asyncio.ensure_future(loading), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)
