"""The Worker gRPC service: converts messages and delegates to the worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc

from services.common.base.errors import SluiceError, internal, invalid, overloaded
from services.common.base.packing import unpack_u32
from services.common.base.shared_steps import shared_step
from services.common.observability import telemetry
from services.common.rpc.errors import abort, answer
from services.common.rpc.session import BatchWriter, serve_session
from services.worker.contract.generation import MediaFile, MediaItem, MediaSpan
from services.worker.generation.response_sink import StreamResponseSink
from services.worker.media.inline import items_of, read_inline
from services.worker.media.uploads import MediaPart
from services.worker.serving.control import Controls
from services.worker.serving.embedding import EmbedCall, embed
from services.worker.serving.session import WorkerSession
from services.worker.serving.tokenizer_files import TokenizerFiles
from services.worker.serving.wire import (
    read_request,
    read_trace,
    write_card,
    write_delta,
    write_loads,
    write_page,
    write_role,
)
from services.worker.serving.worker import Worker
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

END_SESSION_S = 5.0

Q = TypeVar("Q")
A = TypeVar("A")
Context = grpc.aio.ServicerContext[Any, Any]
Action = worker_pb2.ControlRequest


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Serves the RPCs of one worker.

    Args:
        max_pause_s: longest pause between two messages of a session under load.

    Attributes:
        sessions: currently open sessions.
    """

    def __init__(self, worker: Worker, controls: Controls, max_pause_s: float = 0.0) -> None:
        self._worker = worker
        self._controls = controls
        self._max_pause_s = max_pause_s
        self.sessions: set[WorkerSession] = set()
        self._handlers: set[asyncio.Task[Any]] = set()
        self._ending = False

    async def end_sessions(self) -> None:
        """Ends every session with an OK status; flush their output before."""
        self._ending = True
        handlers = set(self._handlers)
        for handler in handlers:
            handler.cancel()
        if handlers:
            await asyncio.wait(handlers, timeout=END_SESSION_S)

    async def Session(  # type: ignore[override]  # the stubs declare iterator handlers only, not read and write
        self, request_iterator: object, context: Context
    ) -> None:
        """See worker.proto."""
        handler = asyncio.current_task()
        assert handler is not None

        def next_batch() -> worker_pb2.TokenBatch | None:
            page = session.take()
            return None if page is None else write_page(page, session.break_off)

        writer = BatchWriter(next_batch, context.write, self._max_pause_s)
        session = WorkerSession(self._worker, writer.wake, lambda: end_overflowed(handler))
        errors: list[SluiceError] = []

        def end_overflowed(task: asyncio.Task[Any]) -> None:
            errors.append(overloaded("The session was ended because its caller does not read its messages."))
            task.cancel()

        self.sessions.add(session)
        self._handlers.add(handler)
        try:
            await serve_session(context, writer, lambda message: _apply(session, message))
        except asyncio.CancelledError:
            if not errors and not self._ending:
                raise
        except Exception:
            if context.cancelled() or context.done():
                raise asyncio.CancelledError from None  # the caller has disconnected
            log.exception("session failed")
            errors.append(internal("The session failed; see the worker's log."))
        finally:
            self.sessions.discard(session)
            self._handlers.discard(handler)
            session.close()
        if errors:
            log.warning("session ended: %s", errors[0].message)
            async with asyncio.timeout(END_SESSION_S):
                await abort(context, errors[0])

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GenerateDelta]:
        """See worker.proto."""
        carrier = telemetry.carrier_of_metadata(context.invocation_metadata()) or telemetry.carrier(request.trace)
        sink = StreamResponseSink()
        with telemetry.stage("worker.generate", parent=carrier, model=request.model):
            try:
                trace = {**read_trace(request.trace), **telemetry.headers()} if telemetry.tracing() else None
                files = await read_inline(request.files) if request.files else {}
                self._worker.submit(read_request(request, partial(self._inline_items, files)), sink, trace)
            except SluiceError as error:
                await abort(context, error)
            except Exception:
                log.exception("failed to read a request", extra={"request": request.request_id})
                await abort(context, _unreadable())
            try:
                async with aclosing(sink.deltas()) as deltas:
                    async for delta in deltas:
                        yield write_delta(delta)
            except Exception:
                if context.cancelled() or context.done():
                    raise asyncio.CancelledError from None  # the caller has disconnected
                log.exception("generation failed", extra={"request": request.request_id})
                await abort(context, internal("The worker failed on this request; see its log."))
            finally:
                self._worker.cancel(sink)

    async def Embed(self, request: worker_pb2.EmbedRequest, context: Context) -> worker_pb2.EmbedResponse:
        """See worker.proto."""
        return await self._serve("embed", self._embed, request, context, telemetry.carrier(request.trace))

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortResponse:
        """See worker.proto."""
        return await self._serve("abort", self._abort, request, context)

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> worker_pb2.GetInfoResponse:
        """See worker.proto."""
        return await self._serve("get_info", self._get_info, request, context)

    async def Control(self, request: worker_pb2.ControlRequest, context: Context) -> worker_pb2.ControlResponse:
        """See worker.proto."""
        return await self._serve("control", self._control, request, context)

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.TokenizerChunk]:
        """See worker.proto."""
        with telemetry.stage(
            "worker.get_tokenizer", parent=telemetry.carrier_of_metadata(context.invocation_metadata())
        ):
            try:
                fingerprint = self._worker.config.fingerprint
                async for piece in TokenizerFiles(self._worker.config.source).pieces():
                    yield worker_pb2.TokenizerChunk(
                        file_name=piece.file_name,
                        file_size=piece.file_size,
                        data=piece.data,
                        fingerprint=fingerprint,
                    )
                    fingerprint = ""
            except SluiceError as error:
                await abort(context, error)

    async def _serve(
        self,
        verb: str,
        handler: Callable[[Q], Awaitable[A]],
        request: Q,
        context: Context,
        caller: dict[str, str] | None = None,
    ) -> A:
        parent = telemetry.carrier_of_metadata(context.invocation_metadata()) or caller
        with telemetry.stage(f"worker.{verb}", parent=parent):
            return await answer(context, handler, request)

    def _inline_items(self, files: Mapping[bytes, MediaFile], spans: Sequence[MediaSpan]) -> tuple[MediaItem, ...]:
        self._worker.require_media(spans)
        return items_of(spans, files)

    async def _embed(self, request: worker_pb2.EmbedRequest) -> worker_pb2.EmbedResponse:
        if any(prompt.media for prompt in request.inputs):
            raise invalid("Embeddings of media items are not supported; send text only.", param="input")
        inputs = [unpack_u32(prompt.token_ids, f"inputs[{index}]") for index, prompt in enumerate(request.inputs)]
        seconds = [prompt.second_text_at for prompt in request.inputs]
        call = EmbedCall(request.model, inputs, seconds, request.dimensions, request.lora)
        embedded = await embed(self._worker, call)
        return worker_pb2.EmbedResponse(
            embeddings=[worker_pb2.Embedding(values=vector) for vector in embedded.vectors],
            usage=common_pb2.Usage(prompt_tokens=embedded.prompt_tokens),
        )

    async def _abort(self, request: worker_pb2.AbortRequest) -> worker_pb2.AbortResponse:
        return worker_pb2.AbortResponse(found=self._worker.abort(request.request_id))

    async def _get_info(self, request: worker_pb2.GetInfoRequest) -> worker_pb2.GetInfoResponse:
        worker, phases = self._worker, self._worker.phases
        info = worker_pb2.GetInfoResponse(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            draining=worker.draining,
            phase=phases.name or phases.warning,
            phase_share=phases.share,
        )
        if worker.started:
            config = worker.config
            info.card.CopyFrom(write_card(config, worker.loaded_unix_s))
            info.role = write_role(config.role)
            info.load.CopyFrom(write_loads(worker.load())[0])
            info.engine, info.engine_version = config.engine, config.engine_version
        return info

    async def _control(self, request: worker_pb2.ControlRequest) -> worker_pb2.ControlResponse:
        if request.action == Action.ACTION_UNSPECIFIED or request.action not in Action.Action.values():
            raise invalid(f"Action {request.action} is unknown to this version of the worker.", param="action")
        name = Action.Action.Name(request.action).removeprefix("ACTION_").lower()
        return worker_pb2.ControlResponse(results=await self._controls.run(name, dict(request.arguments)))


@shared_step("worker.apply")
def _apply(session: WorkerSession, message: worker_pb2.WorkerSessionRequest) -> None:
    """Applies a message; what one request or file raises ends only that one."""
    for part in message.media:
        session.receive(MediaPart(part.hash, part.size, part.offset, part.data, part.media_type))
    for start in message.starts:
        try:
            trace = read_trace(start.request.trace) if telemetry.tracing() else None
            session.start(start.slot, read_request(start.request, session.find_media), trace)
        except SluiceError as error:
            session.refuse(start.slot, error)
        except Exception:
            log.exception("failed to read a request", extra={"request": start.request.request_id})
            session.refuse(start.slot, _unreadable())
    if message.cancels:
        session.cancel(_slots(message.cancels))


def _unreadable() -> SluiceError:
    return internal("The worker failed to read this request; see its log.")


def _slots(packed: bytes) -> list[int]:
    """Unpacks slot numbers; an incomplete last one is ignored, as unknown slots are."""
    return unpack_u32(packed[: len(packed) // 4 * 4], "cancels").tolist()
