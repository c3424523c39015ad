"""Workers that break exactly one clause of the contract: a proxy before a correct worker that spoils its answers."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32, unpack_u32
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import abort, from_rpc_error, to_detail
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

Action = worker_pb2.ControlRequest
Request = worker_pb2.GenerateRequest
Extra = worker_pb2.TokenExtra
Context = Any


@dataclass
class Seen:
    """One request as it came from the caller, and what has happened to it."""

    request: Request
    slot: int
    session: Passing
    tokens: int = 0
    cancelled: bool = False
    cached: int = 0


@dataclass
class Passing:
    """One session on its way through."""

    live: dict[int, Seen] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)


class Honest:
    """Passes everything on; a broken worker overrides what it spoils."""

    serving = True
    reflection = True
    slow = False
    """The kit finds it by waiting."""

    def __init__(self) -> None:
        self.ghosts = 0
        self.live = 0

    def refuses(self, seen: Seen, together: Sequence[Seen]) -> SluiceError | None:
        """An error in place of the request; `together` are the starts of the same message."""
        return None

    def request(self, request: Request) -> None:
        """Changes a request before the worker sees it."""

    def part(self, chunk: worker_pb2.MediaChunk) -> None:
        """Changes a part of a media file before the worker sees it."""

    def cancels(self, slots: list[int]) -> None:
        """Hears the cancels; may raise to end the session."""

    def tokens(self, seen: Seen, ids: list[int]) -> list[int]:
        """Ids on their way back."""
        return ids

    def crash_reason(self, seen: Seen, extra: Extra) -> list[int]:
        """Ids put before the terminal delta."""
        return []

    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        """Anything else on its way back."""
        return [extra]

    def batch(self, batch: worker_pb2.TokenBatch) -> None:
        """Changes a whole message."""

    def dropped(self, live: int) -> None:
        """A session was dropped with so many requests alive."""

    def generate_dropped(self) -> None:
        """A Generate call was dropped."""

    def generated(self, delta: worker_pb2.GenerateDelta) -> None:
        """Changes a delta of Generate."""

    async def generate_refused(self, context: Context, error: SluiceError) -> None:
        """Generate was refused."""
        await abort(context, error)

    async def info(self, info: worker_pb2.GetInfoResponse) -> None:
        """Changes the answer of GetInfo."""
        info.load.running_requests += self.ghosts

    def chunk(self, chunk: worker_pb2.TokenizerChunk) -> None:
        """Changes a piece of the tokenizer."""

    def aborted(self, answer: worker_pb2.AbortResponse) -> None:
        """Changes the answer of Abort."""

    def control(self, request: worker_pb2.ControlRequest) -> worker_pb2.ControlResponse | SluiceError | None:
        """An answer in place of the worker's."""
        return None

    def embedded(
        self, request: worker_pb2.EmbedRequest, answer: worker_pb2.EmbedResponse | SluiceError
    ) -> worker_pb2.EmbedResponse | SluiceError:
        """Changes the answer of Embed."""
        return answer


class Proxy(worker_pb2_grpc.WorkerServicer):
    """A worker that is another one with a flaw."""

    def __init__(self, stub: worker_pb2_grpc.WorkerAsyncStub, flaw: Honest) -> None:
        self._stub = stub
        self._flaw = flaw

    async def Session(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]
        self._flaw.ghosts = 0
        upstream = self._stub.Session()
        passing = Passing()
        write = asyncio.Lock()
        back = asyncio.create_task(self._back(upstream, passing, context, write))
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                await self._forth(message, upstream, passing, context, write)
        finally:
            self._flaw.dropped(len(passing.live))
            self._flaw.live -= len(passing.live)
            upstream.cancel()
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)

    async def _forth(self, message: Any, upstream: Any, passing: Passing, context: Context, write: Any) -> None:
        starts, refused = [], []
        fresh = [Seen(start.request, start.slot, passing) for start in message.starts]
        for seen in fresh:
            error = self._flaw.refuses(seen, fresh)
            passing.used.add(seen.slot)
            if error is not None:
                refused.append(
                    Extra(
                        slot=seen.slot,
                        finish_reason=common_pb2.FINISH_REASON_ERROR,
                        error=to_detail(error),
                        usage=common_pb2.Usage(),
                    )
                )
                continue
            passing.live[seen.slot] = seen
            self._flaw.live += 1
            changed = Request()
            changed.CopyFrom(seen.request)
            self._flaw.request(changed)
            starts.append(worker_pb2.SessionStart(slot=seen.slot, request=changed))
        slots = unpack_u32(message.cancels).tolist()
        self._flaw.cancels(slots)
        for slot in slots:
            if slot in passing.live:
                passing.live[slot].cancelled = True
        if refused:
            async with write:
                await context.write(worker_pb2.TokenBatch(extras=refused))
        for chunk in message.media:
            self._flaw.part(chunk)
        await upstream.write(
            worker_pb2.WorkerSessionRequest(starts=starts, cancels=message.cancels, media=message.media)
        )

    async def _back(self, upstream: Any, passing: Passing, context: Context, write: asyncio.Lock) -> None:
        while (batch := await upstream.read()) is not grpc.aio.EOF:
            spoiled = self._spoil(batch, passing)
            async with write:
                await context.write(spoiled)

    def _spoil(self, batch: worker_pb2.TokenBatch, passing: Passing) -> worker_pb2.TokenBatch:
        slots, counts, ids, extras = array("I"), array("I"), array("I"), []

        def row(slot: int, values: list[int]) -> None:
            slots.append(slot)
            counts.append(len(values))
            ids.extend(values)

        token_ids, start = unpack_u32(batch.token_ids).tolist(), 0
        for slot, count in zip(unpack_u32(batch.slots), unpack_u32(batch.counts), strict=True):
            seen = passing.live[slot]
            row(slot, self._flaw.tokens(seen, token_ids[start : start + count]))
            seen.tokens += count
            start += count
        for extra in batch.extras:
            seen = passing.live[extra.slot]
            seen.cached = max(seen.cached, extra.cached_tokens)
            if extra.finish_reason:
                if words := self._flaw.crash_reason(seen, extra):
                    row(extra.slot, words)
                    extra.usage.completion_tokens += len(words)
                del passing.live[extra.slot]
                self._flaw.live -= 1
            extras += self._flaw.extra(seen, extra)
        spoiled = worker_pb2.TokenBatch(
            slots=pack_u32(slots), counts=pack_u32(counts), token_ids=pack_u32(ids), extras=extras
        )
        self._flaw.batch(spoiled)
        return spoiled

    async def Generate(self, request: Request, context: Context) -> AsyncIterator[worker_pb2.GenerateDelta]:
        call = self._stub.Generate(request)
        try:
            async for delta in call:
                self._flaw.generated(delta)
                yield delta
        except grpc.aio.AioRpcError as error:
            await self._flaw.generate_refused(context, from_rpc_error(error, "worker"))
        except (asyncio.CancelledError, GeneratorExit):
            self._flaw.generate_dropped()
            raise
        finally:
            call.cancel()

    async def Embed(self, request: worker_pb2.EmbedRequest, context: Context) -> worker_pb2.EmbedResponse:
        try:
            said: worker_pb2.EmbedResponse | SluiceError = await self._stub.Embed(request)
        except grpc.aio.AioRpcError as error:
            said = from_rpc_error(error, "worker")
        answer = self._flaw.embedded(request, said)
        if isinstance(answer, SluiceError):
            await abort(context, answer)
        return answer

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortResponse:
        answer = await self._stub.Abort(request)
        self._flaw.aborted(answer)
        return answer

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> worker_pb2.GetInfoResponse:
        info = await self._stub.GetInfo(request)
        await self._flaw.info(info)
        return info

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[worker_pb2.TokenizerChunk]:
        async for chunk in self._stub.GetTokenizer(request):
            self._flaw.chunk(chunk)
            yield chunk

    async def Control(self, request: worker_pb2.ControlRequest, context: Context) -> worker_pb2.ControlResponse:
        answer = self._flaw.control(request)
        if answer is None:
            try:
                return await self._stub.Control(request)
            except grpc.aio.AioRpcError as error:
                answer = from_rpc_error(error, "worker")
        if isinstance(answer, SluiceError):
            await abort(context, answer)
        return answer


@asynccontextmanager
async def broken(address: str, flaw: Honest) -> AsyncIterator[str]:
    """The address of a worker with a flaw, in front of the correct one at `address`."""
    channel = open_channel(address)
    settings = GrpcServiceSettings(listen="127.0.0.1:0", reflection=flaw.reflection)
    server = GrpcServer(settings, worker_pb2.DESCRIPTOR)
    worker_pb2_grpc.add_WorkerServicer_to_server(Proxy(worker_pb2_grpc.WorkerStub(channel), flaw), server.server)
    await server.start()
    try:
        await server.set_serving(flaw.serving)
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)
        await channel.close()


def failure(kind: ErrorKind = ErrorKind.INTERNAL) -> SluiceError:
    """What a broken worker says."""
    return SluiceError(kind, "Something went wrong.")


def ids_of(request: Request) -> list[int]:
    """Whole ids of a request's prompt."""
    packed = request.tokens.token_ids
    return unpack_u32(packed[: len(packed) // 4 * 4]).tolist()


def anonymous(request: Request) -> bytes:
    """A request without its id."""
    copy = Request()
    copy.CopyFrom(request)
    copy.request_id = ""
    return copy.SerializeToString(deterministic=True)


def fresh_id() -> str:
    """An unknown id."""
    return uuid.uuid4().hex


Predicate = Callable[[Request], bool]
