"""gRPC service of postprocess; converts messages and delegates to sessions and streams."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any

import grpc

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid
from services.common.base.packing import pack_u32, unpack_u32
from services.common.base.shared_steps import shared_step
from services.common.base.tasks import Stop
from services.common.discovery.discovered_models import DiscoveredModel
from services.common.discovery.model_discovery import ModelDiscovery
from services.common.observability import telemetry
from services.common.rpc.errors import abort, answer
from services.common.rpc.server import GrpcServer
from services.common.rpc.session import BatchWriter, serve_session
from services.postprocess.metrics import Metrics
from services.postprocess.parsers.registry import ParserRegistry
from services.postprocess.settings import PostprocessSettings
from services.postprocess.streams.factory import CustomParsers, StreamFactory
from services.postprocess.streams.session import PostSession, SessionLimits
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry
from services.postprocess.wire import to_options, to_reason, to_response, to_resume, to_text_batch
from sluice.v1 import postprocess_pb2, postprocess_pb2_grpc

log = logging.getLogger(__name__)

LEAVE_NOTICE_S = 1.0
"""How long gateways may take to stop opening streams after a replica announces that it leaves."""

SessionContext = grpc.aio.ServicerContext[postprocess_pb2.PostSessionRequest, postprocess_pb2.TextBatch]
PiecesContext = grpc.aio.ServicerContext[postprocess_pb2.TokenPiecesRequest, postprocess_pb2.TokenPiecesResponse]
ParseContext = grpc.aio.ServicerContext[postprocess_pb2.ParseRequest, postprocess_pb2.ParseResponse]


class PostprocessService(postprocess_pb2_grpc.PostprocessServicer):
    """Implements `sluice.v1.Postprocess`.

    Args:
        library: vocabularies of the models.
        limits: bounds of requests.
        stream_factory: creates streams.
        on_death: called if a background task fails.
        max_pause_s: longest pause between two messages of a session under load.
    """

    def __init__(
        self,
        library: VocabularyRegistry,
        limits: SessionLimits,
        stream_factory: StreamFactory,
        on_death: Callable[[str, BaseException], None] | None = None,
        max_pause_s: float = 0.0,
    ) -> None:
        self._library = library
        self._limits = limits
        self._stream_factory = stream_factory
        self._on_death = on_death
        self._max_pause_s = max_pause_s
        self._metrics = Metrics()
        self._sessions: set[PostSession] = set()
        self._leaving = False
        self._draining = False

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    def leave(self) -> None:
        """Announces on every session that this replica leaves, so that callers move their streams in time."""
        self._leaving = True
        for session in self._sessions:
            session.leave()

    def start_draining(self) -> None:
        """Makes sessions end once their last stream has finished."""
        self._draining = True
        for session in self._sessions:
            session.start_draining()

    async def Session(self, request_iterator: object, context: SessionContext) -> None:  # type: ignore[override]
        def next_batch() -> postprocess_pb2.TextBatch | None:
            batch = session.drain()
            return None if batch is None else to_text_batch(batch, session.refuse)

        writer = BatchWriter(next_batch, context.write, self._max_pause_s)
        session = PostSession(
            self._library, self._limits, self._metrics, writer.wake, self._on_death, self._stream_factory
        )

        def on_message(message: postprocess_pb2.PostSessionRequest) -> None:
            began_s = perf_counter()
            apply(session, message)
            self._metrics.worked(perf_counter() - began_s)
            writer.wake()

        self._sessions.add(session)
        if self._leaving:
            session.leave()
        if self._draining:
            session.start_draining()
        try:
            await _until_drained(session, serve_session(context, writer, on_message))
            await session.settle()
            while (batch := next_batch()) is not None:
                await context.write(batch)
        except SluiceError as error:
            await abort(context, error)
        except Exception:
            log.exception("unexpected error in a session")
            await abort(context, internal("Unexpected error; see the log of postprocess."))
        finally:
            self._sessions.discard(session)
            await session.aclose()

    async def TokenPieces(
        self, request: postprocess_pb2.TokenPiecesRequest, context: PiecesContext
    ) -> postprocess_pb2.TokenPiecesResponse:
        return await answer(context, self._token_pieces, request)

    async def _token_pieces(self, request: postprocess_pb2.TokenPiecesRequest) -> postprocess_pb2.TokenPiecesResponse:
        tokens = unpack_u32(request.token_ids)
        if len(tokens) > self._limits.max_message_tokens:
            raise _too_many(len(tokens), self._limits.max_message_tokens)
        vocabulary = await self._library.get(request.model)
        pieces = vocabulary.pieces(tokens)
        return postprocess_pb2.TokenPiecesResponse(lengths=pack_u32(map(len, pieces)), pieces=b"".join(pieces))

    async def Parse(
        self, request: postprocess_pb2.ParseRequest, context: ParseContext
    ) -> postprocess_pb2.ParseResponse:
        parent = telemetry.carrier_of_metadata(context.invocation_metadata())
        with telemetry.stage("postprocess.parse", parent, model=request.options.model):
            return await answer(context, self._parse, request)

    async def _parse(self, request: postprocess_pb2.ParseRequest) -> postprocess_pb2.ParseResponse:
        options = to_options(request.options)
        if options.token_texts:
            raise invalid("Parse does not return token texts; call TokenPieces or use a session.", param="token_texts")
        tokens = unpack_u32(request.token_ids)
        if len(tokens) > self._limits.max_message_tokens:
            raise _too_many(len(tokens), self._limits.max_message_tokens)
        vocabulary = await self._library.get(options.model)
        reason, identity = to_reason(request.finish_reason), secrets.token_hex(12)
        events, finish = await self._stream_factory.parse(tokens, options, vocabulary, reason, identity)
        if finish.error is not None:
            raise finish.error
        self._metrics.took(len(tokens))
        self._metrics.finished(finish)
        return to_response(events, finish)


def _too_many(tokens: int, most: int) -> SluiceError:
    return SluiceError(ErrorKind.TOO_LARGE, f"{tokens} tokens are too many; send at most {most}.", param="token_ids")


async def _until_drained(session: PostSession, serving: Coroutine[Any, Any, None]) -> None:
    """Serves until the caller half-closes, or until a draining session has no streams left."""
    tasks = {asyncio.ensure_future(serving), asyncio.ensure_future(session.drained.wait())}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@shared_step("postprocess.apply")
def apply(session: PostSession, message: postprocess_pb2.PostSessionRequest) -> None:
    """Applies one message to its session; raises SluiceError if the session must end."""
    for opening in message.opens:
        try:
            options = to_options(opening.options)
            resume = to_resume(opening.resume) if opening.HasField("resume") else None
        except Exception as error:
            session.fail(opening.slot, error)
            continue
        parent = telemetry.carrier(opening.trace) if telemetry.tracing() else {}
        session.open(opening.slot, opening.request_id, options, parent, resume)
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


async def serve(settings: PostprocessSettings, stop: Stop) -> None:
    """Serves until `stop` is set: healthy once the models are loaded, drained within `drain_s` at the end."""

    async def learn(model: str, timeout_s: float) -> bool:
        return discovery is not None and await discovery.wait_for(model, timeout_s)

    library = VocabularyRegistry(
        settings.served,
        parsers=settings.parsers,
        native=settings.native_of,
        check=ParserRegistry(settings.own_parsers, {**settings.engines, **settings.later_engines}).check,
        learn=learn if settings.learns else None,
    )
    limits = SessionLimits()
    custom = CustomParsers(settings.own_parsers, engines=settings.engines, later=settings.later_engines)
    stream_factory = StreamFactory(limits.stream, custom, stop.fail)
    discovery: ModelDiscovery | None = None
    if settings.learns:
        host, names = _Models(library, stream_factory, settings), {spec.name for spec in settings.served}
        discovery = ModelDiscovery.of_settings("postprocess", settings, host, names, stop.fail)
    service = PostprocessService(library, limits, stream_factory, stop.fail, settings.session_pause_s)
    server = GrpcServer(settings, postprocess_pb2.DESCRIPTOR)
    postprocess_pb2_grpc.add_PostprocessServicer_to_server(service, server.server)
    await server.start()
    try:
        if discovery is not None:
            discovery.start()
        await stream_factory.start()
        if await stop.unless_set(_loaded(library, stream_factory)):
            if discovery is not None:
                await stop.unless_set(discovery.catch_up())
            await server.set_serving(True)
            await stop.wait()
            await server.set_serving(False)
            service.leave()
            if service.sessions:
                # Gateways may still open streams here until they have received the announcement.
                await asyncio.sleep(min(LEAVE_NOTICE_S, settings.drain_s))
    finally:
        service.start_draining()
        await server.stop(settings.drain_s)
        if discovery is not None:
            await discovery.close()
        await library.close()
        await stream_factory.close()


class _Models:
    """Loads discovered models."""

    def __init__(
        self, library: VocabularyRegistry, stream_factory: StreamFactory, settings: PostprocessSettings
    ) -> None:
        self._library = library
        self._stream_factory = stream_factory
        self._settings = settings
        self.by_use = library.by_use

    async def add(self, model: DiscoveredModel) -> None:
        await self._library.add(self._settings.learned_spec(model))
        self._settings.warn_without_native_code(model)
        await self._stream_factory.prepare_for(await self._library.get(model.spec.name))

    async def remove(self, model: DiscoveredModel) -> None:
        if source := self._library.remove(model.spec.name):
            self._stream_factory.release(source)


async def _loaded(library: VocabularyRegistry, stream_factory: StreamFactory) -> None:
    """Loads all models, and the engine parsers that `auto` selects for them."""
    await asyncio.gather(*(stream_factory.prepare_for(vocabulary) for vocabulary in await library.load_all()))
