"""B6: names, log lines and errors that others choose."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from services.common.base import logs
from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.streams.stream import GenerationStream
from sluice.v1 import (
    common_pb2,
    router_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.clients.callers import now_us, ready_routers, refusal
from tests.support.servers.router_cluster import FakeWorker
from tests.support.waiting import until


class TextLog:
    """What the services of this process write as text."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self._handler = logging.StreamHandler(self.stream)
        self._handler.setFormatter(logs.TextFormatter())

    def __enter__(self) -> TextLog:
        root = logging.getLogger()
        self._level = root.level
        root.setLevel(logging.INFO)
        root.addHandler(self._handler)
        return self

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger().removeHandler(self._handler)
        logging.getLogger().setLevel(self._level)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


SLOT = 7
FORGED = "00:00:00.000 ERROR   services.router  forged"
NAMES = [
    f"w\n{FORGED}",
    f"w\r{FORGED}",
    f"w\u2028{FORGED}",
    f"w\x85{FORGED}",
    "w\x1b[2J",
    "w\x00",
    "w\u202e",
    "w" * 301,
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:6]))
async def test_name_that_is_not_printable_is_refused_and_forges_no_log_line(name: str) -> None:
    places: dict[str, Callable[[router_pb2.Registration], None]] = {
        "worker_id": lambda one: setattr(one, "worker_id", name),
        "address": lambda one: setattr(one, "address", f"{name}:1"),
        "model": lambda one: setattr(one.card, "model", name),
        "adapters": lambda one: one.card.adapters.append(name),
        "capabilities": lambda one: one.card.capabilities.append(name),
        "engine": lambda one: setattr(one, "engine", name),
        "engine_version": lambda one: setattr(one, "engine_version", name),
        "tool_parser": lambda one: setattr(one.card, "tool_parser", name),
    }
    with TextLog() as log:
        async with ready_routers() as (router,):
            for place, spoil in places.items():
                worker = FakeWorker("w1", epoch=now_us())
                spoil(worker.registration)
                error = await refusal(router, worker)
                assert error.kind is ErrorKind.INVALID_ARGUMENT, place
                assert place in error.param, place
                assert error.message.isprintable()
            watch = router.stub.WatchWorkers(router_pb2.WatchWorkersRequest(owner=2 * name + "\n"))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await watch.read()
            assert from_rpc_error(refused.value, "router").param == "owner"
        logging.getLogger("services.router").warning("said %s", name, extra={"worker": name})
    assert not any(line.startswith(FORGED[:12]) for line in log.lines)
    assert "\x1b" not in log.stream.getvalue()


@pytest.mark.parametrize("address", ["unix:/run/secret.sock:1", "dns:///x:1", "xds:///x:1", "w", "w:0", ":1", "[w]:1"])
async def test_address_that_is_not_host_and_port_is_refused(address: str) -> None:
    """What gateways would take for a socket file or the name of a resolver."""
    async with ready_routers() as (router,):
        worker = FakeWorker("w1", epoch=now_us())
        worker.registration.address = address
        assert (await refusal(router, worker)).kind is ErrorKind.INVALID_ARGUMENT


def test_log_value_cannot_pass_for_further_fields_or_lines() -> None:
    with TextLog() as log:
        logger = logging.getLogger("services.router")
        logger.warning("a worker said %s", "x\nINFO y", extra={"worker": "w1  level=ERROR", "reason": "it\tis\u2029so"})
        try:
            raise ValueError(f"odd\n{FORGED}")
        except ValueError:
            logger.exception("failed")
    first, second, *trace = log.lines
    assert first.endswith('a worker said x\\nINFO y  worker="w1  level=ERROR"  reason=it\\tis\\u2029so')
    assert second.endswith("failed")
    assert all(line.startswith(logs.BAR) for line in trace)
    assert json.loads('"\\u2029"') not in log.stream.getvalue()


def test_json_log_line_holds_no_line_break_of_a_value() -> None:
    record = logging.makeLogRecord({"msg": "worker", "worker": "w\x85\u2028\x9b2J\ud800"})
    line = logs.JsonFormatter("router").format(record)
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["worker"] == record.__dict__["worker"]


@dataclass
class Events:
    """What a link reports about its streams."""

    failed: dict[int, SluiceError] = field(default_factory=dict)
    lost: list[SluiceError] = field(default_factory=list)

    def on_failed(self, stream: GenerationStream, error: SluiceError) -> None:
        self.failed[stream.slot] = error

    def on_worker_lost(self, link: WorkerLink, error: SluiceError) -> None:
        self.lost.append(error)


class Liar(worker_pb2_grpc.WorkerServicer):
    """A worker that answers with the error it is told to."""

    def __init__(self) -> None:
        self.detail = common_pb2.ErrorDetail()
        self.status: grpc.StatusCode | None = None

    async def Session(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        if self.status is not None:
            detail = (("sluice-error-bin", self.detail.SerializeToString()),)
            await context.abort(self.status, "no", detail)
        await context.write(
            worker_pb2.TokenBatch(
                extras=[
                    worker_pb2.TokenExtra(slot=SLOT, finish_reason=common_pb2.FINISH_REASON_ERROR, error=self.detail)
                ]
            )
        )
        await asyncio.Event().wait()


@pytest.mark.parametrize("where", ["stream", "session"])
@pytest.mark.parametrize("kind", ["UNAUTHENTICATED", "PERMISSION_DENIED", "CANCELLED", "INVALID_ARGUMENT"])
async def test_error_of_a_worker_is_cut_and_accuses_no_client(where: str, kind: str) -> None:
    liar = Liar()  # type: ignore[abstract]
    liar.detail = common_pb2.ErrorDetail(
        kind=common_pb2.ErrorKind.Value(f"ERROR_KIND_{kind}"),
        message="evil\r\nSet-Cookie: x " + 100_000 * "m",
        param="p\n" + 100_000 * "p",
        code=100_000 * "c",
        retry_after_ms=2**32 - 1,
    )
    if where == "session":
        liar.detail.message, liar.detail.param = liar.detail.message[:900], "p\n"
        liar.detail.code = 500 * "c"  # what fits into trailing metadata
        liar.status = grpc.StatusCode[kind]
    events, tasks = Events(), TaskOwner()
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), worker_pb2.DESCRIPTOR)
    worker_pb2_grpc.add_WorkerServicer_to_server(liar, server.server)
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.port}")
    link = WorkerLink(
        "w1",
        "w1:1",
        channel,
        5.0,
        cast(Any, events),
    )
    link.adopt(cast(GenerationStream, SimpleNamespace(slot=SLOT, tokens=array("I"))))
    try:
        tasks.spawn(link.run(), "link")
        await until(lambda: bool(events.failed if where == "stream" else events.lost))
        error = events.failed[SLOT] if where == "stream" else events.lost[0]
    finally:
        await tasks.close()
        await channel.close()
        await server.stop(0)
    assert error.http_status not in (401, 403, 499)
    assert (error.http_status == 400) is (kind == "INVALID_ARGUMENT")
    assert error.message.isprintable()
    assert len(error.message) <= 500
    assert len(error.param) <= 200
    assert error.param.isprintable()
    assert len(error.code) <= 64
    assert error.retry_after_ms <= 600_000
