"""What a worker tells its router, spoiled on the way: one flaw for each rule about registration and cache events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc

from services.common.base.packing import pack_u64, unpack_u64
from services.common.rpc.channels import open_channel
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import router_pb2, router_pb2_grpc

Message = router_pb2.AttachRequest
Flaw = Callable[[Message], bool]
"""Changes a message; False keeps it back."""


def _other_epoch(message: Message) -> bool:
    if message.HasField("registration"):
        message.registration.epoch += 1
    return True


def _no_heartbeat(message: Message) -> bool:
    return not message.HasField("heartbeat")


def _other(packed: bytes) -> bytes:
    return pack_u64(block_hash ^ 1 for block_hash in unpack_u64(packed))


def _other_hashes(message: Message) -> bool:
    for event in message.events.events:
        for part in (event.stored, event.removed):
            if part.block_hashes:
                part.block_hashes = _other(part.block_hashes)
    if message.HasField("snapshot"):
        message.snapshot.block_hashes = _other(message.snapshot.block_hashes)
    return True


def _every_second_number(message: Message) -> bool:
    for part in ("events", "snapshot"):
        if message.HasField(part):
            getattr(message, part).sequence *= 2
    return True


def _short_snapshot(message: Message) -> bool:
    if message.HasField("snapshot"):
        message.snapshot.block_hashes = message.snapshot.block_hashes[8:]
    return True


FLAWS: dict[str, Flaw] = {
    "registration": _other_epoch,
    "heartbeat": _no_heartbeat,
    "kv-events": _other_hashes,
    "kv-event-numbers": _every_second_number,
    "resync": _short_snapshot,
}


class _Passing(router_pb2_grpc.RouterServicer):
    def __init__(self, channel: grpc.aio.Channel, flaw: Flaw) -> None:
        self._stub = router_pb2_grpc.RouterStub(channel)
        self._flaw = flaw

    async def Attach(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        call = self._stub.Attach()
        back = asyncio.create_task(self._back(call, context))
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                if self._flaw(message):
                    await call.write(message)
        finally:
            call.cancel()
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)

    async def _back(self, call: Any, context: Any) -> None:
        while (answer := await call.read()) is not grpc.aio.EOF:
            await context.write(answer)


@asynccontextmanager
async def spoiling(router: str, flaw: Flaw) -> AsyncIterator[str]:
    """The address of a router that passes everything on to another one, spoiled."""
    channel = open_channel(router)
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), router_pb2.DESCRIPTOR)
    router_pb2_grpc.add_RouterServicer_to_server(cast(Any, _Passing)(channel, flaw), server.server)
    await server.start()
    try:
        await server.set_serving(True)
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)
        await channel.close()
