"""gRPC service of the router; converts messages and delegates to the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MethodType
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from services.common.base import logs
from services.common.base.errors import ErrorKind, SluiceError, invalid, unavailable
from services.common.observability import telemetry
from services.common.rpc.call_server import Metadata, MultiplexedCallServer
from services.common.rpc.errors import abort, answer
from services.common.security import identity
from services.common.security.identity import Caller
from services.router.registration.stream import HEARTBEATS_PER_LEASE, WorkerStream
from services.router.registration.stream_messages import Inbox, WorkerMessage, read_pace, size_of
from services.router.router import Router
from services.router.rpc import queries as query_messages
from services.router.rpc import workers as messages
from services.router.scheduling.queries import Query, check_owner
from services.router.scheduling.request_bodies import ReadBody
from services.router.state.reservations.cost import CostModel
from services.router.state.reservations.ids import reservation_id, scoped, within
from services.router.state.workers.worker import Worker, WorkerRank
from sluice.v1 import router_pb2, router_pb2_grpc

log = logging.getLogger(__name__)

INBOX_LIMIT = 256  # messages of one worker received but not handled yet
WRITE_TIMEOUT_S = 10.0
DEFAULT_DECISIONS = 100
QUEUES_EVERY_S = 0.25

_RESERVATION_ID = attrgetter("reservation_id")

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


def _stopping() -> SluiceError:
    return unavailable("This router replica is stopping; retry on another one.", code="stopping", retry_after_ms=100)


@dataclass(frozen=True, slots=True)
class _OpenStream:
    worker: Worker
    inbox: Inbox[WorkerMessage]


def _unary(
    verb: str,
) -> Callable[
    [Callable[[RouterService, Q], Awaitable[A]]], Callable[[RouterService, Q, Context], Coroutine[Any, Any, A]]
]:
    """Makes a handler a unary RPC: within the span of the verb, with typed errors as statuses."""

    def decorate(
        handle: Callable[[RouterService, Q], Awaitable[A]],
    ) -> Callable[[RouterService, Q, Context], Coroutine[Any, Any, A]]:
        async def call(self: RouterService, request: Q, context: Context) -> A:
            with telemetry.stage(f"router.{verb}", parent=telemetry.carrier_of_metadata(context.invocation_metadata())):
                return await answer(context, MethodType(handle, self), request)

        call.__wrapped__ = handle  # type: ignore[attr-defined]
        return call

    return decorate


class RouterService(router_pb2_grpc.RouterServicer):
    """Implements the Router service.

    Args:
        max_pause_s: longest pause between two messages of a session under load.
    """

    def __init__(self, router: Router, cost: CostModel, max_pause_s: float = 0.0) -> None:
        self._router = router
        self._cost = cost
        self._max_pause_s = max_pause_s
        self._open_streams: set[_OpenStream] = set()
        self._registering = asyncio.Lock()  # one in each turn of the event loop: queries are answered between two
        self._stopped = False

    def stop(self) -> None:
        """Ends long-lived streams, so that workers and watchers reconnect to another replica."""
        self._stopped = True
        self._router.stop()
        for open_stream in self._open_streams:
            open_stream.inbox.end(_stopping())

    def unary(self, name: str) -> Callable[[Message], Awaitable[Message]]:
        """Returns the handler of a unary RPC without gRPC's context, for other transports; it raises typed errors."""
        handler: Callable[[Message], Awaitable[Message]] = MethodType(getattr(type(self), name).__wrapped__, self)
        return handler

    @_unary("query")
    async def RouteQuery(self, request: router_pb2.RouteQueryRequest) -> router_pb2.RouteQueryResponse:
        return await self.route(request)

    async def Session(  # type: ignore[override]  # reads and writes by context
        self, calls: AsyncIterator[router_pb2.RouteCalls], context: Context
    ) -> None:
        answers = router_pb2.RouteAnswer, router_pb2.RouteAnswers
        calls_server = MultiplexedCallServer(
            self._answer_call, *answers, max_pause_s=self._max_pause_s, greeting={"reports": True}
        )
        await calls_server.serve(context)

    async def _answer_call(self, call: router_pb2.RouteCall, metadata: Metadata) -> Mapping[str, Message]:
        parent = telemetry.carrier_of_metadata(metadata)
        if call.HasField("free"):
            with telemetry.stage("router.free", parent=parent):
                return {"freed": await self._free(call.free)}
        if call.HasField("mark_prefill_complete"):
            with telemetry.stage("router.mark", parent=parent):
                return {"marked": await self._mark(call.mark_prefill_complete)}
        with telemetry.stage("router.query", parent=parent):
            return {"response": await self.route(call.request)}

    async def route(
        self, request: router_pb2.RouteQueryRequest, body: ReadBody | None = None
    ) -> router_pb2.RouteQueryResponse:
        """Returns the response to a query, whose prompt may be a body that has been read; raises typed errors."""
        logs.request_id.set(request.request_id)
        query = query_messages.query_of(request, self._cost, identity.current.get().scope)
        if body is not None:
            query = replace(query, prompt=replace(query.prompt, body=body))
        return query_messages.response_of(await self._router.query(query))

    @_unary("add")
    async def AddRequest(self, request: router_pb2.AddRequestRequest) -> router_pb2.AddRequestResponse:
        query_messages.check_request_id(request.request_id)
        prompt = query_messages.prompt_of(request.prompt, request.lora, request.cache_salt)
        scope = identity.current.get().scope
        query = Query(
            model=request.model,
            prompt=prompt,
            cost=self._cost,
            request_id=scoped(scope, request.request_id),
            candidates=frozenset((request.worker_id,)),
            expected_output_tokens=request.expected_output_tokens,
            ttl_ms=request.ttl_ms,
            owner=scoped(scope, request.owner),
            scope=scope,
        )
        choice, overlap = await self._router.add(WorkerRank(request.worker_id, request.data_parallel_rank), query)
        return router_pb2.AddRequestResponse(
            reservation_id=reservation_id(request.model, query.request_id),
            expires_unix_ms=choice.expires_unix_ms,
            overlap=query_messages.overlap_of(overlap),
        )

    @_unary("mark")
    async def MarkPrefillComplete(
        self, request: router_pb2.MarkPrefillCompleteRequest
    ) -> router_pb2.MarkPrefillCompleteResponse:
        return await self._mark(request)

    async def _mark(self, request: router_pb2.MarkPrefillCompleteRequest) -> router_pb2.MarkPrefillCompleteResponse:
        ids = within(identity.current.get().scope, request.reservation_ids)
        unknown = await self._router.lifecycle.mark_prefill_complete(ids)
        unknown += len(request.reservation_ids) - len(ids)
        return router_pb2.MarkPrefillCompleteResponse(unknown=unknown)

    @_unary("free")
    async def FreeRequest(self, request: router_pb2.FreeRequestRequest) -> router_pb2.FreeRequestResponse:
        return await self._free(request)

    async def _free(self, request: router_pb2.FreeRequestRequest) -> router_pb2.FreeRequestResponse:
        scope = identity.current.get().scope
        ids = within(scope, request.reservation_ids)
        theirs = frozenset(within(scope, map(_RESERVATION_ID, request.outcomes)))
        outcomes = [query_messages.outcome_of(each) for each in request.outcomes if each.reservation_id in theirs]
        unknown = await self._router.lifecycle.free(ids, outcomes)
        return router_pb2.FreeRequestResponse(unknown=unknown + len(request.reservation_ids) - len(ids))

    @_unary("progress")
    async def ReportProgress(self, request: router_pb2.ReportProgressRequest) -> router_pb2.ReportProgressResponse:
        outputs = {each.reservation_id: each.output_tokens for each in request.progress}
        ids = within(identity.current.get().scope, outputs)
        unknown = await self._router.lifecycle.progress({each: outputs[each] for each in ids})
        return router_pb2.ReportProgressResponse(unknown=unknown + len(outputs) - len(ids))

    @_unary("decisions")
    async def GetDecisions(self, request: router_pb2.GetDecisionsRequest) -> router_pb2.GetDecisionsResponse:
        found = self._router.decisions.latest(request.model, request.limit or DEFAULT_DECISIONS)
        return router_pb2.GetDecisionsResponse(decisions=[query_messages.decision_of(each) for each in found])

    @_unary("queues")
    async def GetQueues(self, request: router_pb2.GetQueuesRequest) -> router_pb2.GetQueuesResponse:
        return query_messages.queues_of(self._router.queues.waiting, request.model)

    async def WatchQueues(
        self, request: router_pb2.GetQueuesRequest, context: Context
    ) -> AsyncIterator[router_pb2.GetQueuesResponse]:
        sent = None
        while not self._stopped:
            response = query_messages.queues_of(self._router.queues.waiting, request.model)
            if response != sent:
                yield response
                sent = response
            await asyncio.sleep(QUEUES_EVERY_S)
        await abort(context, _stopping())

    @_unary("list")
    async def ListWorkers(self, request: router_pb2.ListWorkersRequest) -> router_pb2.ListWorkersResponse:
        self._router.check_ready()
        workers = self._router.registry.workers(request.model)
        return router_pb2.ListWorkersResponse(workers=messages.worker_infos(workers, self._router.report))

    @_unary("loads")
    async def GetLoads(self, request: router_pb2.GetLoadsRequest) -> router_pb2.GetLoadsResponse:
        self._router.check_ready()
        loads = await self._router.loads(request.model)
        return router_pb2.GetLoadsResponse(
            loads=[
                messages.booked_load(slot, load, self._router.report(worker))
                for slot, (worker, load) in sorted(loads.items())
            ]
        )

    @_unary("overlaps")
    async def GetOverlaps(self, request: router_pb2.GetOverlapsRequest) -> router_pb2.GetOverlapsResponse:
        prompt = query_messages.prompt_of(request.prompt, request.lora, request.cache_salt)
        prompt = await self._router.tokenized(request.model, prompt)
        return router_pb2.GetOverlapsResponse(
            overlaps=[
                router_pb2.WorkerOverlap(
                    worker_id=slot.worker_id,
                    data_parallel_rank=slot.rank,
                    overlap=query_messages.overlap_of(overlap),
                )
                for slot, overlap in sorted(self._router.overlaps(request.model, prompt).items())
            ]
        )

    async def DumpIndex(
        self, request: router_pb2.DumpIndexRequest, context: Context
    ) -> AsyncIterator[router_pb2.IndexDump]:
        try:
            self._router.check_ready()
        except SluiceError as error:
            await abort(context, error)
        for view in self._router.indexes(request.model):
            for message in messages.dump_of(view):
                yield message

    async def WatchWorkers(
        self, request: router_pb2.WatchWorkersRequest, context: Context
    ) -> AsyncIterator[router_pb2.WorkerChange]:
        if self._stopped:
            await abort(context, _stopping())
        try:
            self._router.check_ready()
            check_owner(request.owner)
        except SluiceError as error:
            await abort(context, error)
        owner = scoped(identity.current.get().scope, request.owner)
        watch = self._router.registry.watch(request.model)
        try:
            async with self._router.owners.stream(owner):
                while not watch.ended:
                    for message in messages.changes_of(await watch.next(), self._router.report):
                        yield message
            await abort(context, _stopping())
        finally:
            self._router.registry.unwatch(watch)

    async def Attach(  # type: ignore[override]  # reads and writes by context, for deadlines on both
        self, requests: AsyncIterator[router_pb2.AttachRequest], context: Context
    ) -> None:
        lease_s = self._router.config.lease_ms / 1000
        try:
            async with asyncio.timeout(lease_s):
                first = await context.read()
            async with self._registering:
                await asyncio.sleep(0)
            attachment, sequences = await self._register(first, context)
            await self._serve_attached(attachment, sequences, context)
        except SluiceError as error:
            await abort(context, error)
        except TimeoutError:
            await abort(
                context,
                SluiceError(ErrorKind.DEADLINE_EXCEEDED, f"Received no message for {lease_s:g} s; send heartbeats."),
            )
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            log.exception("unexpected error in a worker stream")
            await abort(context, SluiceError(ErrorKind.INTERNAL, "Unexpected error; see the router's log."))

    async def _register(self, first: Any, context: Context) -> tuple[WorkerStream, dict[int, int]]:
        caller = identity.current.get()
        try:
            if first is grpc.aio.EOF or first.WhichOneof("message") != "registration":
                raise invalid("The first message must be a registration.", param="message")
            if self._stopped:
                raise _stopping()
            self._router.check_ready()
            worker = messages.worker_of(first.registration, caller)
            if not caller.may_register(worker.worker_id):
                raise _not_allowed(caller, worker.worker_id)
            host = str(context.peer()).rpartition(":")[0].partition(":")[2]  # without the port, which differs
            return await self._router.worker_manager.attach(worker, f"{caller.proof or 'anonymous'} at {host}")
        except SluiceError as error:
            self._router.metrics.refused.add(1, {"code": error.code or error.kind.name.lower()})
            raise

    async def _serve_attached(self, attachment: WorkerStream, sequences: dict[int, int], context: Context) -> None:
        worker = attachment.worker
        open_stream = _OpenStream(worker, Inbox(INBOX_LIMIT, size=size_of))
        self._replace(open_stream)
        reading = asyncio.create_task(read_messages(open_stream.inbox, worker, context))
        try:
            lease_ms = self._router.config.lease_ms
            attached = router_pb2.Attached(
                lease_ms=lease_ms, heartbeat_interval_ms=lease_ms // HEARTBEATS_PER_LEASE, sequences=sequences
            )
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await context.write(router_pb2.AttachResponse(attached=attached))
            await self._handle_messages(attachment, open_stream.inbox, context)
        except SluiceError as error:
            if not self._stopped:
                self._router.metrics.disconnected_workers.add(1, {"why": error.code or error.kind.name.lower()})
                log.warning("disconnecting worker: %s", error.message, extra={"worker": worker.worker_id})
            raise
        except TimeoutError:
            self._router.metrics.disconnected_workers.add(1, {"why": "silent"})
            log.warning("disconnecting worker: no heartbeat", extra={"worker": worker.worker_id})
            raise
        finally:
            self._open_streams.discard(open_stream)
            open_stream.inbox.end()
            self._router.worker_manager.detach(attachment)
            reading.cancel()

    def _replace(self, open_stream: _OpenStream) -> None:
        """Ends earlier streams of the same worker."""
        worker_id = open_stream.worker.worker_id
        for other in self._open_streams:
            if other.worker.worker_id == worker_id:
                other.inbox.end(
                    SluiceError(
                        ErrorKind.FAILED_PRECONDITION,
                        f"Worker {worker_id} attached again; this stream ends.",
                        code="replaced",
                    )
                )
        self._open_streams.add(open_stream)

    async def _handle_messages(self, attachment: WorkerStream, inbox: Inbox[WorkerMessage], context: Context) -> None:
        """Handles received messages in batches until the worker half-closes the stream."""
        lease_s = self._router.config.lease_ms / 1000
        metrics = self._router.metrics
        while received := await inbox.take(lease_s):
            replies = await attachment.handle(received)
            for outcome, count in replies.outcomes.items():
                metrics.event_batches.add(count, {"outcome": outcome})
            if replies.resyncs:
                metrics.resyncs.add(len(replies.resyncs))
            for message in messages.replies_of(replies):
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await context.write(message)


def _not_allowed(caller: Caller, worker_id: str) -> SluiceError:
    allowed = f"register as worker {caller.worker_id}" if caller.worker_id else "use a credential of that worker"
    return SluiceError(
        ErrorKind.PERMISSION_DENIED,
        f"Caller {caller.name} is not allowed to register worker {worker_id}; {allowed}.",
        param="registration.worker_id",
        code="caller_not_allowed",
    )


async def read_messages(inbox: Inbox[WorkerMessage], worker: Worker, context: Context) -> None:
    """Reads the messages of an attached worker into its inbox, at a bounded rate, until the stream ends."""
    pace = read_pace(worker)
    try:
        while (message := await context.read()) is not grpc.aio.EOF:
            if message is None:  # gRPC could not parse it, and has logged the failure
                raise invalid("The message cannot be parsed, or has too many tiny parts.", param="message")
            content = messages.message_of(message, worker)
            message = None  # it takes more than its content, and may wait for space
            await inbox.put(content)
            if pause_s := pace.pause_s():
                await asyncio.sleep(pause_s)
        inbox.end()
    except SluiceError as error:
        inbox.end(error.with_traceback(None))  # which refers to the message and to the inbox
    except (grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError):
        inbox.end()  # the call has ended
    except Exception:
        log.exception("reading a worker's message failed", extra={"worker": worker.worker_id})
        inbox.end(SluiceError(ErrorKind.INTERNAL, "The message cannot be read; see the router's log."))
