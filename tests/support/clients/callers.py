"""Callers of a router, and of any service of the suite, with a token or a certificate of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from services.common.base.errors import SluiceError
from services.common.base.packing import pack_u32
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.security.tls import channel_credentials
from services.common.settings.service import TlsSettings
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.servers.router_cluster import MODEL, FakeWorker, RouterProcess, routers
from tests.support.waiting import until

A_DAY_US = 24 * 3600 * 1_000_000
RESERVE = router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE


def now_us() -> int:
    """Returns an epoch: Unix microseconds."""
    return time.time_ns() // 1_000


def prompt(*tokens: int) -> router_pb2.PromptRef:
    """Returns a prompt of token ids."""
    return router_pb2.PromptRef(token_ids=pack_u32(tokens))


def query(ref: router_pb2.PromptRef, request_id: str = "", **more: Any) -> router_pb2.RouteQueryRequest:
    """Returns a query for a worker; with a request id, it also reserves."""
    mode = {"mode": RESERVE, "request_id": request_id} if request_id else {}
    return router_pb2.RouteQueryRequest(**{"model": MODEL, "prompt": ref, **mode, **more})


async def refused(call: Awaitable[Any], within_s: float = 60) -> SluiceError:
    """Returns the error of a call that has to fail.

    Raises:
        TimeoutError: it did not end in time.
    """
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, within_s)
    return from_rpc_error(caught.value, "called")


async def is_attached(call: Any) -> bool:
    """Whether the router's first message of an Attach says that the worker is attached."""
    return bool((await call.read()).HasField("attached"))


class Calls:
    """A stub on a channel that shows a token and a certificate, or none."""

    def __init__(self, port: int, token: str = "", tls: TlsSettings | None = None) -> None:
        credentials = None if tls is None else channel_credentials(tls)
        self.port = port
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.channel = open_channel(f"127.0.0.1:{port}", credentials)

    async def call(self, module: Any, service: str, method: str, request: Message | None = None) -> SluiceError | None:
        """Returns the error of a call, or None when its first message arrives.

        Raises:
            TimeoutError: neither arrived within 20 s.
        """
        descriptor = module.DESCRIPTOR.services_by_name[service].methods_by_name[method]
        sent = request or getattr(module, descriptor.input_type.name)()
        make: Any = self.channel.stream_stream if descriptor.client_streaming else self.channel.unary_stream
        open_call = make(
            f"/sluice.v1.{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(module, descriptor.output_type.name).FromString,
        )
        arguments = () if descriptor.client_streaming else (sent,)
        call = open_call(*arguments, metadata=self._metadata)
        try:
            if descriptor.client_streaming and request is not None:
                await call.write(request)
            async with asyncio.timeout(20):
                await call.read()
            if call.done() and await call.code() is not grpc.StatusCode.OK:
                raise AssertionError("an error that read did not raise")
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, service)
        finally:
            call.cancel()
        return None

    async def ask(self, method: str, request: Message) -> Any:
        """The answer of a router."""
        return await getattr(router_pb2_grpc.RouterStub(self.channel), method)(request, metadata=self._metadata)

    async def register(self, registration: router_pb2.Registration) -> SluiceError | None:
        """How a registration ends; an accepted one is given up again."""
        return await self.call(router_pb2, "Router", "Attach", router_pb2.AttachRequest(registration=registration))


async def attached(router: RouterProcess, worker: FakeWorker) -> SluiceError | None:
    """Why a worker's registration is refused; None when it is attached."""
    try:
        await worker.attach(router)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, "router")
    return None


async def refusal(router: RouterProcess, worker: FakeWorker) -> SluiceError:
    """Why a worker's registration is refused; AssertionError when it is not."""
    error = await attached(router, worker)
    assert error is not None, "the registration was accepted"
    return error


async def attach_soon(router: RouterProcess, worker: FakeWorker) -> None:
    """Attaches a worker as soon as its id is free; AssertionError for any other reason to refuse it."""

    async def accepted() -> bool:
        error = await attached(router, worker)
        assert error is None or error.code == "worker_id_taken", error
        return error is None

    await until(accepted)


async def addresses(router: RouterProcess) -> dict[str, str]:
    """Address by worker id, as callers see the workers."""
    answer = await router.stub.ListWorkers(router_pb2.ListWorkersRequest())
    return {worker.worker_id: worker.address for worker in answer.workers}


@asynccontextmanager
async def ready_routers(count: int = 1, **settings: Any) -> AsyncIterator[list[RouterProcess]]:
    """Router replicas that have reached their store."""
    async with routers(count, **settings) as replicas:
        for replica in replicas:
            await replica.ready()
        yield replicas
