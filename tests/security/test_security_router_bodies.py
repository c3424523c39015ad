"""Bodies that strangers send to a router: to its endpoint picker, its HTTP API and its queries."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from starlette.requests import Request

from services.common.base.errors import ErrorKind, SluiceError
from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.router.http_api.bodies import MAX_ITEMS
from services.router.http_api.route import query_of
from sluice.v1 import common_pb2, router_pb2
from tests.support.clients.callers import query
from tests.support.clients.ext_proc import Exchange
from tests.support.oracles.errors import raises_error
from tests.support.servers.picker import CHAT, picker
from tests.support.servers.preprocess_server import preprocess
from tests.support.servers.router_child import RouterChild, router_children
from tests.support.servers.router_cluster import MODEL, FakeWorker, routers
from tests.support.waiting import until

MIB = 1 << 20
LEASE_MS = 20_000
SENT_MIB = {"picker": 9, "twin": 3, "query": 4}
HEAD = b'{"model":"%s","messages":[' % MODEL.encode()
HOSTILE = {
    "lists": (b"[],", b"[]]}"),
    "objects": (b"{},", b"{}]}"),
    "strings": (b'"",', b'""]}'),
    "numbers": (b"0,", b"0]}"),
    "names": (b'{"a":[]},', b"0]}"),
    "depth": (b"[", b""),
    "depth and values": (b'[{"a":', b""),
    "no end": (b'"\\"', b""),
}
AT_ONCE = 8
SALT = "sluice-tenant-0123456789abcdef0123456789abcdef"
MAX_GROWTH_MIB = 150


def hostile(kind: str, mib: int) -> bytes:
    unit, end = HOSTILE[kind]
    return HEAD + unit * (mib * MIB // len(unit)) + end


def image(mib: int) -> bytes:
    """A chat with an image of as many MiB in base64."""
    url = f"data:image/png;base64,{base64.b64encode(bytes(mib * MIB * 3 // 4)).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": [part]}]}).encode()


class Attacked:
    """A router process with a picker, an HTTP API and preprocess, and a worker whose lease is short."""

    def __init__(self, child: RouterChild, picker: grpc.aio.Channel, http: httpx.AsyncClient) -> None:
        self.child = child
        self._picker = picker
        self._http = http

    async def status(self, entrance: str, body: bytes, tokenize_ms: int = 0) -> int:
        """Returns the HTTP status that answers a body, 0 for an endpoint chosen; errors must be those of the API."""
        if entrance == "picker":
            exchange = Exchange(self._picker)
            answered = await exchange.request(body)
            exchange.cut()
            assert not answered.status or json.loads(answered.error)["error"]["message"].endswith(".")
            return answered.status
        if entrance == "twin":
            answer = await self._http.post("/route?reserve=false", content=body)
            assert answer.status_code == 200 or answer.json()["error"]["message"].endswith(".")
            return answer.status_code if answer.status_code != 200 else 0
        try:
            prompt = router_pb2.PromptRef(openai_body=body)
            await self.child.stub.RouteQuery(query(prompt, tokenize_ms=tokenize_ms), timeout=60)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, "the router").http_status
        return 0

    def memory_mib(self, name: str) -> float:
        """Returns a figure of /proc/PID/status, such as VmHWM, the most memory it has had."""
        lines = Path(f"/proc/{self.child.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


@asynccontextmanager
async def attacked_router(folder: Path) -> AsyncIterator[Attacked]:
    """A router under attack; its worker must stay registered on its first attachment."""
    picker, api = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    async with preprocess() as address:
        flags = ("--lease-ms", str(LEASE_MS), "--picker-listen", picker, "--http-listen", api, "--preprocess", address)
        async with (
            router_children(1, folder, *flags) as [child],
            httpx.AsyncClient(base_url=f"http://{api}", timeout=60) as http,
        ):
            worker, channel = FakeWorker("a"), open_channel(picker)
            worker.registration.http_address = "192.168.1.1:8000"
            await worker.attach(child)
            worker.keep_beating()
            try:
                yield Attacked(child, channel, http)
                assert worker.ended is None, worker.ended
                assert [each.worker_id for each in (await child.stub.ListWorkers(LIST)).workers] == ["a"]
            finally:
                await worker.detach()
                await channel.close()


FAILING = {
    "body": ("RouteQuery", query(router_pb2.PromptRef(openai_body=b"{}"))),
    "model": ("RouteQuery", router_pb2.RouteQueryRequest(model="unknown")),
    "tokens": ("RouteQuery", query(router_pb2.PromptRef(token_ids=b"x"))),
    "add": ("AddRequest", router_pb2.AddRequestRequest(model=MODEL, worker_id="unknown", request_id="r")),
    "overlaps": (
        "GetOverlaps",
        router_pb2.GetOverlapsRequest(model=MODEL, prompt=router_pb2.PromptRef(openai_body=b"{}")),
    ),
}


@pytest.mark.parametrize("call", FAILING)
async def test_call_that_fails_leaves_no_request_to_the_garbage_collector(call: str) -> None:
    name, request = FAILING[call]

    def errors() -> int:
        return sum(isinstance(each, SluiceError) for each in gc.get_objects())

    async with routers() as (router,):
        worker = FakeWorker("a")
        await worker.attach(router)
        gc.collect()
        gc.disable()
        try:
            before = errors()
            for _ in range(5):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await getattr(router.stub, name)(request, timeout=20)
            await until(lambda: errors() <= before)
        finally:
            gc.enable()
        await worker.detach()


REFUSED = {
    "loads": router_pb2.AttachRequest(heartbeat=router_pb2.Heartbeat(loads=[common_pb2.WorkerLoad()] * 2)),
    "kind": router_pb2.AttachRequest(),
    "event": router_pb2.AttachRequest(events=router_pb2.KvEventBatch(sequence=1, events=[router_pb2.KvEvent()])),
    "rank": router_pb2.AttachRequest(events=router_pb2.KvEventBatch(data_parallel_rank=9, sequence=1)),
}


@pytest.mark.parametrize("message", REFUSED)
async def test_worker_whose_message_is_refused_leaves_nothing_to_the_garbage_collector(message: str) -> None:
    def errors() -> int:
        return sum(isinstance(each, SluiceError) for each in gc.get_objects())

    async with routers() as (router,):
        gc.collect()
        gc.disable()
        try:
            before = errors()
            for number in range(5):
                worker = FakeWorker(f"evil-{number}")
                await worker.attach(router)
                await worker.write(REFUSED[message])
                await until(lambda worker=worker: worker.ended is not None)  # type: ignore[misc]
                await worker.detach()
            await until(lambda: errors() <= before)
        finally:
            gc.enable()


@pytest.mark.parametrize("items", [[0], {"a": 0}], ids=["list", "object"])
@pytest.mark.parametrize("field", ["messages", "tools", "documents", "stop", "metadata", "unknown"])
def test_list_or_object_of_too_many_items_is_refused_by_the_twin(field: str, items: object) -> None:
    request = Request({"type": "http", "headers": [], "query_string": b""})
    most = items * MAX_ITEMS if isinstance(items, list) else {str(number): 0 for number in range(MAX_ITEMS)}
    assert query_of(request, {"model": MODEL, field: most}).model == MODEL
    more = [*most, 0] if isinstance(most, list) else {**most, "one more": 0}
    with raises_error(match="exceed the limit of 10000", kind=ErrorKind.INVALID_ARGUMENT, param=field):
        query_of(request, {"model": MODEL, field: more})
    assert query_of(request, {"model": MODEL, "prompt": [1] * (2 * MAX_ITEMS)}).model == MODEL


LIST = router_pb2.ListWorkersRequest()


@pytest.mark.parametrize("entrance", SENT_MIB)
async def test_hostile_body_is_a_typed_4xx_at_every_entrance_and_no_lease_lapses(entrance: str, tmp_path: Path) -> None:
    async with attacked_router(tmp_path) as router:
        before = router.memory_mib("VmRSS")
        statuses = {kind: await router.status(entrance, hostile(kind, SENT_MIB[entrance]), 2_000) for kind in HOSTILE}
        assert set(statuses.values()) <= {400, 413}, statuses
        assert router.memory_mib("VmHWM") < before + MAX_GROWTH_MIB


@pytest.mark.parametrize("entrance", SENT_MIB)
async def test_eight_large_bodies_at_once_stay_within_memory_and_no_lease_lapses(entrance: str, tmp_path: Path) -> None:
    async with attacked_router(tmp_path) as router:
        mib = SENT_MIB[entrance]
        await router.status(entrance, HEAD + b'{"role":"user","content":"hi"}]}')
        before = router.memory_mib("VmRSS")
        for kind in ("lists", "numbers", "image"):
            body = image(mib) if kind == "image" else hostile(kind, mib)
            statuses = set[int]()
            for _ in range(2):  # what the first ones took is given back
                statuses |= set(await asyncio.gather(*(router.status(entrance, body) for _ in range(AT_ONCE))))
            assert statuses <= ({0, 400, 429, 503} if kind == "image" else {400, 413, 429, 503}), kind
        assert router.memory_mib("VmHWM") < before + MAX_GROWTH_MIB


@pytest.mark.parametrize("gateways", [[], ["127.0.0.1:9"]], ids=["workers", "gateways"])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"cache_salt": SALT}, "cache_salt"),
        ("/v1/completions", {"prompt": "x", "extra_key": SALT}, "extra_key"),
        ("/v1/chat/completions", {"vllm_xargs": {"cache_salt": SALT}}, "vllm_xargs.cache_salt"),
        ("/v1/chat/completions", {"custom_params": {"extra_key": SALT}}, "custom_params.extra_key"),
        ("/v1/chat/completions", {"nvext": {"cache_salt": SALT}}, "nvext.cache_salt"),
        ("/v1/responses", {"input": "x", "cache_salt": SALT}, "cache_salt"),
        ("/v1/messages", {"cache_salt": SALT}, None),
        ("/v1/embeddings", {"input": "x", "cache_salt": SALT}, "cache_salt"),
        ("/v1/other", {"cache_salt": SALT}, "cache_salt"),
    ],
)
async def test_salt_of_a_tenant_is_refused_as_at_the_gateway(
    path: str, fields: dict[str, Any], param: str | None, gateways: list[str]
) -> None:
    async with picker(picker_gateways=gateways) as found:
        answered = await found.pick({**CHAT, **fields}, path=path)
        assert answered.status == 400
        error = json.loads(answered.error)["error"]
        assert error.get("param") == param
        assert "must not start with 'sluice-tenant-', which is reserved for the salts of tenants." in error["message"]
        assert (await found.pick({**CHAT, "cache_salt": "my-own"})).endpoints
