"""A worker that registers like any other and then sends whatever a test gives it.

It needs nothing but the network: no engine and no model files. Frames are messages or raw bytes, so that a test can
send what no protobuf library would write. Reuse it wherever a change reads something that a worker sends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.base.packing import pack_u32
from services.common.packages.model_files import fingerprint
from services.common.types.hashing import HASH_SCHEME
from sluice.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2
from tests.support.waiting import until

SERVICE = "sluice.v1.Worker"
WAIT_S = 60


def rows(*step_tokens: tuple[int, list[int]]) -> worker_pb2.TokenBatch:
    """A batch with the given slots and their token ids."""
    return worker_pb2.TokenBatch(
        slots=pack_u32([slot for slot, _ in step_tokens]),
        counts=pack_u32([len(ids) for _, ids in step_tokens]),
        token_ids=pack_u32([token for _, ids in step_tokens for token in ids]),
    )


def extra(slot: int, **fields: Any) -> worker_pb2.TokenBatch:
    """A batch with one extra."""
    return worker_pb2.TokenBatch(extras=[worker_pb2.TokenExtra(slot=slot, **fields)])


def card(model: str, **fields: Any) -> common_pb2.ModelCard:
    """A card that a router accepts; keywords replace its fields."""
    usual = {
        "model": model,
        "block_size": 16,
        "hash_scheme": HASH_SCHEME,
        "total_blocks": 1024,
        "context_length": 4096,
        "vocab_size": 131_072,
        "data_parallel_size": 1,
        "created_unix_s": int(time.time()),
        "capabilities": ["token_ids", "logprobs", "prompt_logprobs"],
    }
    return common_pb2.ModelCard(**{**usual, **fields})


class _Session:
    """One gateway's session: what it asked for, and what is still to be sent to it."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Message | bytes | None] = asyncio.Queue()
        self.starts: dict[int, worker_pb2.GenerateRequest] = {}


class HostileWorker:
    """Serves the Worker API on a free port.

    Args:
        worker_id: name to register under.
        model: served name on its card.
        on_start: called with the slot and the request of every generation that a gateway starts here.
        on_embed: answers Embed; may raise SluiceError-like gRPC aborts through the context it is given.
        tokenizer: a tokenizer's single file, which GetTokenizer sends; None: it has none.

    Attributes:
        sessions: those that are open now.
        starts: every generation that was started here, by slot.
        sent: frames written so far.
        opened: sessions opened so far.
    """

    def __init__(
        self,
        worker_id: str = "hostile",
        model: str = "evil",
        on_start: Callable[[int, worker_pb2.GenerateRequest], None] = lambda slot, request: None,
        on_embed: Callable[[worker_pb2.EmbedRequest, Any], Any] | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.model = model
        self.sessions: set[_Session] = set()
        self.starts: dict[int, worker_pb2.GenerateRequest] = {}
        self.sent = 0
        self.opened = 0
        self.port = 0
        self._on_start = on_start
        self._on_embed = on_embed
        self._tokenizer = tokenizer
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._channels: list[grpc.aio.Channel] = []

    @property
    def address(self) -> str:
        """host:port that gateways connect to."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(_Healthy(), self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()
        assert self._server is not None
        await self._server.stop(0)

    def _handlers(self) -> grpc.GenericRpcHandler:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Session": grpc.stream_stream_rpc_method_handler(
                self._session, worker_pb2.WorkerSessionRequest.FromString, _serialized
            ),
            "GetInfo": grpc.unary_unary_rpc_method_handler(
                self._info, worker_pb2.GetInfoRequest.FromString, _serialized
            ),
            "GetTokenizer": grpc.unary_stream_rpc_method_handler(
                self._send_tokenizer, worker_pb2.GetTokenizerRequest.FromString, _serialized
            ),
            "Embed": grpc.unary_unary_rpc_method_handler(self._embed, worker_pb2.EmbedRequest.FromString, _serialized),
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _session(self, requests: AsyncIterator[Any], context: Any) -> None:
        session = _Session()
        self.sessions.add(session)
        self.opened += 1
        self._changed.set()
        reading = asyncio.create_task(self._read(session, requests))
        try:
            while (frame := await session.frames.get()) is not None:
                await context.write(frame)
                self.sent += 1
        finally:
            reading.cancel()
            self.sessions.discard(session)
            self._changed.set()

    async def _read(self, session: _Session, requests: AsyncIterator[Any]) -> None:
        async for message in requests:
            for start in message.starts:
                session.starts[start.slot] = self.starts[start.slot] = start.request
                self._on_start(start.slot, start.request)
            self._changed.set()
        session.frames.put_nowait(None)

    async def _info(self, request: Any, context: Any) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(worker_id=self.worker_id, epoch=1, card=card(self.model))

    async def _send_tokenizer(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.TokenizerChunk]:
        if self._tokenizer is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no tokenizer here")
            return
        data = self._tokenizer.read_bytes()
        for start in range(0, len(data), 1 << 20):
            yield worker_pb2.TokenizerChunk(
                fingerprint=fingerprint(self._tokenizer),
                file_name=self._tokenizer.name,
                file_size=len(data),
                data=data[start : start + (1 << 20)],
            )

    async def _embed(self, request: worker_pb2.EmbedRequest, context: Any) -> Any:
        if self._on_embed is None:
            return await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no vectors here")
        return self._on_embed(request, context)

    def send(self, *frames: Message | bytes) -> None:
        """Queues frames for every open session, in order."""
        for session in self.sessions:
            for frame in frames:
                session.frames.put_nowait(frame)

    def close_sessions(self) -> None:
        """Ends every open session after what is queued."""
        for session in self.sessions:
            session.frames.put_nowait(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition about sessions or starts holds; TimeoutError after a minute."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def connected(self) -> None:
        """Waits until a gateway has a session open."""
        await self.until(lambda: bool(self.sessions))

    async def drained(self) -> None:
        """Waits until every queued frame was written, or its session has ended."""
        await until(lambda: all(session.frames.empty() for session in self.sessions), WAIT_S)

    async def attach(self, router: str, **registration: Any) -> Attached:
        """Registers with a router; keywords replace fields of the registration.

        Raises:
            grpc.aio.AioRpcError: the router refused.
        """
        channel = grpc.aio.insecure_channel(router)
        self._channels.append(channel)
        usual = {
            "worker_id": self.worker_id,
            "address": self.address,
            "epoch": time.time_ns() // 1000,
            "card": card(self.model),
            "role": common_pb2.WORKER_ROLE_AGGREGATED,
            "engine": "hostile",
        }
        attached = Attached(router_pb2_grpc.RouterStub(channel).Attach())
        await attached.register(router_pb2.Registration(**{**usual, **registration}))
        return attached


class Attached:
    """The stream to a router that is a worker's lease; heartbeats keep it alive until `close`."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._beating: asyncio.Task[None] | None = None

    async def register(self, registration: router_pb2.Registration) -> None:
        """Sends the registration and waits for the answer."""
        await self.call.write(router_pb2.AttachRequest(registration=registration))
        answer = await asyncio.wait_for(self.call.read(), WAIT_S)
        if not isinstance(answer, router_pb2.AttachResponse):
            raise grpc.aio.AioRpcError(
                await self.call.code(), await self.call.initial_metadata(), await self.call.trailing_metadata()
            )
        self._beating = asyncio.create_task(self._beat(answer.attached.heartbeat_interval_ms / 1000))

    async def send(self, message: router_pb2.AttachRequest) -> None:
        """Sends a message to the router."""
        await self.call.write(message)

    async def _beat(self, every_s: float) -> None:
        heartbeat = router_pb2.AttachRequest(heartbeat=router_pb2.Heartbeat())
        while True:
            await asyncio.sleep(every_s)
            await self.call.write(heartbeat)

    async def close(self) -> None:
        """Ends the lease."""
        if self._beating is not None:
            self._beating.cancel()
        self.call.cancel()


class _Healthy(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


def _serialized(frame: Message | bytes) -> bytes:
    return frame if isinstance(frame, bytes) else frame.SerializeToString()
