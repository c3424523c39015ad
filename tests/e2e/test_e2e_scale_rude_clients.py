"""Hundreds of streams at once, of which some are read slowly and some left: the others hear all, and nothing stays."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator

import grpc
import httpx
import psutil
import pytest

from services.common.net.ports import free_port
from sluice.v1 import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.servers.suite import Suite

WAIT_S = 300
STREAMS = 200
TOKENS = 50
METRICS = f"127.0.0.1:{free_port()}"
ROOM = {
    "SLUICE_WORKER_ENGINE_ARGS": "timing=fixed,fixed_step_ms=40",
    "SLUICE_WORKER_MAX_SEQUENCES": str(STREAMS),
    "SLUICE_POSTPROCESS_METRICS_LISTEN": METRICS,
    "SLUICE_GATEWAY_MAX_UNSENT_KB": "16",
    "SLUICE_GATEWAY_WRITE_TIMEOUT_S": "4",
}


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    with Suite("--speedup", "1", env=ROOM) as running:
        yield running


class Crowd:
    """Clients of one gateway."""

    def __init__(self, suite: Suite) -> None:
        host, _, port = suite.url.removeprefix("http://").partition(":")
        self._address = (host, int(port))
        self.over = asyncio.Event()

    def _request(self, tokens: int, **more: object) -> bytes:
        body = {"model": "tekken", "messages": [{"role": "user", "content": "Go on."}], "stream": True, **more}
        payload = json.dumps({**body, "ignore_eos": True, "max_tokens": tokens}).encode()
        return b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (
            len(payload),
            payload,
        )

    async def patient(self) -> str:
        """Empty when the whole answer came."""
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(self._request(TOKENS))
        text = b""
        while not text.endswith(b"0\r\n\r\n") and (data := await reader.read(65536)):
            text += data
        writer.close()
        whole = text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"error"' not in text
        return "" if whole else text[-500:].decode(errors="replace") or "nothing came"

    async def _asked(self, request: bytes) -> socket.socket:
        loop, client = asyncio.get_running_loop(), socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, self._address)
        await loop.sock_sendall(client, request)
        return client

    async def slow(self) -> None:
        """Takes a few bytes a second of a long answer with much in it."""
        with await self._asked(self._request(2000, logprobs=True, top_logprobs=20)) as client:
            while not self.over.is_set():
                try:
                    if not await asyncio.get_running_loop().sock_recv(client, 64):
                        return
                except ConnectionError:
                    return  # cut
                await asyncio.sleep(0.2)

    async def leaver(self, after_s: float) -> None:
        with await self._asked(self._request(2000)):
            await asyncio.sleep(after_s)


async def crowded(suite: Suite, rude: int) -> list[str]:
    """What went wrong for the patient, while two kinds of rude ones, so many each, are there as well."""
    crowd = Crowd(suite)
    others = [asyncio.create_task(crowd.slow()) for _ in range(rude)]
    others += [asyncio.create_task(crowd.leaver(2.0 * number / max(rude, 1))) for number in range(rude)]
    async with asyncio.timeout(WAIT_S):
        heard = await asyncio.gather(*(crowd.patient() for _ in range(STREAMS - 2 * rude)))
    crowd.over.set()
    await asyncio.gather(*others)
    return [problem for problem in heard if problem]


async def nothing_is_left(suite: Suite) -> None:
    async with asyncio.timeout(WAIT_S):
        while any((found := await left(suite)).values()):
            print(found)
            await asyncio.sleep(0.2)


async def left(suite: Suite) -> dict[str, float]:
    """Of every service, what it still holds for a request."""
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        found = {
            "gateway": gauge((await client.get(f"{suite.url}/metrics")).text, "sluice_gateway_live_streams"),
            "postprocess": gauge((await client.get(f"http://{METRICS}/metrics")).text, "sluice_postprocess_streams"),
        }
    async with grpc.aio.insecure_channel(suite.address("router")) as channel:
        loads = await router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest())
        found["router"] = sum(load.requests for load in loads.loads)
    for address in suite.addresses("worker"):
        async with grpc.aio.insecure_channel(address) as channel:
            info = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest())
            found[address] = info.load.running_requests + info.load.waiting_requests
    port = int(suite.url.rpartition(":")[2])
    (gateway,) = suite.processes("gateway")
    found["connections"] = sum(bool(one.raddr) and one.laddr.port == port for one in gateway.net_connections("tcp"))
    return found


def gauge(text: str, name: str) -> float:
    values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert values, f"no {name}"
    return sum(map(float, values))


def resident(processes: list[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes)


async def test_rude_clients_break_no_stream_of_others_and_leave_nothing_anywhere(suite: Suite) -> None:
    assert await crowded(suite, 0) == []
    assert await crowded(suite, STREAMS // 10) == []
    await nothing_is_left(suite)
    before = resident(suite.processes())
    assert await crowded(suite, STREAMS // 10) == []
    await nothing_is_left(suite)
    assert resident(suite.processes()) < before * 1.1 + (64 << 20)
