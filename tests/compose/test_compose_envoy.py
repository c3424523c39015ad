"""The profile envoy: chats through a real Envoy run where the picker has booked them, while containers come and go."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import httpx
import pytest

from tests.support.clients.chat_load import ChatLoad
from tests.support.servers.compose_suite import REQUESTS, Suite

pytestmark = pytest.mark.compose

DROPPED = "x-llm-d-request-dropped-reason"
ASK = """
import sys, grpc
from google.protobuf.json_format import MessageToJson
from sluice.v1 import router_pb2, router_pb2_grpc
method = sys.argv[1]
with grpc.insecure_channel("127.0.0.1:50051") as channel:
    request = getattr(router_pb2, method + "Request")()
    answer = getattr(router_pb2_grpc.RouterStub(channel), method)(request, timeout=20)
print(MessageToJson(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
"""


@dataclass(frozen=True)
class Chat:
    """One chat's answer.

    Attributes:
        request_id: that the client sent, or empty.
        dropped: reason of a rejection, as the picker sends it.
    """

    status: int
    request_id: str = ""
    text: str = ""
    receipt: dict[str, Any] | None = None
    dropped: str = ""
    retry_after: str = ""


async def ask(client: httpx.AsyncClient, prompt: str, stream: bool = False, model: str = "tekken") -> Chat:
    """Sends a chat with a routing hint of the client's own, and returns its answer."""
    request_id = f"chat-{secrets.token_hex(8)}"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 8,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    headers = {
        "x-request-id": request_id,
        "x-sluice-receipt": "true",
        "x-sluice-worker": "worker-of-the-client",
    }
    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    if answer.status_code != 200:
        found = answer.headers
        return Chat(
            answer.status_code, request_id, answer.text, None, found.get(DROPPED, ""), found.get("retry-after", "")
        )
    if stream:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
    else:
        whole = answer.json()
        text = whole["choices"][0]["message"]["content"]
    (receipt,) = json.loads(answer.headers["x-sluice-route-receipt"])
    return Chat(200, request_id, text, receipt)


class PhasedLoad:
    """Eight chats at a time; counts the statuses of those that began and ended within a phase."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._phase: Counter[int] = Counter()
        self._ended = asyncio.Condition()
        self._stopped = False

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._chat()) for _ in range(8)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)

    async def phase(self, chats: int) -> Counter[int]:
        """Begins a phase; returns how many chats had which status, once so many have ended. 0: cut off."""
        self.leave()
        async with asyncio.timeout(60), self._ended:
            await self._ended.wait_for(lambda: self._phase.total() >= chats)
        return self._phase

    def leave(self) -> None:
        """Ends a phase: no chat counts that is under way now, or begins before the next one."""
        self._phase = Counter()

    async def _chat(self) -> None:
        while not self._stopped:
            began = self._phase
            try:
                status = (await ask(self._client, secrets.token_hex(8))).status
            except (httpx.HTTPError, AssertionError):
                status = 0
            async with self._ended:
                began[status] += 1
                self._ended.notify_all()
            await asyncio.sleep(0.05)


def ask_router(suite: Suite, method: str) -> Any:
    """What the router responds to an RPC without parameters, sent within its container."""
    (router,) = suite.containers("router")
    return json.loads(suite.execute(router, "python", "-c", ASK, method))


def until(holds: Callable[[], bool], problem: str, timeout_s: float = 60) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, problem
        time.sleep(0.5)


async def assert_nothing_is_booked(suite: Suite) -> None:
    """Waits until the load of every rank is zero, of which there is one for each worker."""

    def empty() -> bool:
        loads = ask_router(suite, "GetLoads")["loads"]
        return len(loads) == 2 and not any(load["requests"] for load in loads)

    await asyncio.to_thread(until, empty, "requests stay booked")


def docker(*arguments: str) -> str:
    """Output of a Docker command."""
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


async def test_chats_run_on_the_worker_that_the_picker_has_booked(fronted: Suite) -> None:
    before = fronted.requests_served()["gateway"]
    async with httpx.AsyncClient(base_url=fronted.url, timeout=60) as client:
        gate = asyncio.Semaphore(8)

        async def one(number: int) -> Chat:
            async with gate:
                return await ask(client, f"{number} " + "river " * number * 10, stream=number % 2 == 0)

        chats = await asyncio.gather(*(one(number) for number in range(48)))
    assert [chat for chat in chats if chat.status != 200 or not chat.text] == []
    await assert_nothing_is_booked(fronted)

    decisions = ask_router(fronted, "GetDecisions")["decisions"]
    # The picker appends to the client's id, because clients may repeat theirs.
    booked = {each["request_id"].partition(".")[0]: each for each in decisions}
    receipts = {chat.request_id: chat.receipt for chat in chats}
    assert receipts.keys() <= booked.keys()
    for request_id, receipt in receipts.items():
        assert receipt is not None
        assert receipt["worker"] == booked[request_id]["decode"]["worker_id"]
        assert receipt["reason"] == "named_by_request"
        assert booked[request_id]["output_tokens"] == 8, "the picker reads the usage of each answer"
    after = fronted.requests_served()
    assert all(count > before.get(container, 0) for container, count in after["gateway"].items())
    assert {name: len(after[name]) for name in REQUESTS if name in ("gateway", "worker")} == {"gateway": 2, "worker": 2}
    assert len(Counter(receipt["worker"] for receipt in receipts.values() if receipt)) == 2


async def test_repeats_of_a_long_prefix_run_where_it_is_cached(fronted: Suite) -> None:
    prefix = f"{secrets.token_hex(8)} " + "mountain " * 2_000
    async with httpx.AsyncClient(base_url=fronted.url, timeout=60) as client:
        first = await ask(client, prefix)
        repeats = [await ask(client, f"{prefix} and {number}", stream=True) for number in range(12)]
    assert first.receipt is not None
    for chat in repeats:
        assert chat.receipt is not None
        assert chat.receipt["worker"] == first.receipt["worker"]
        assert chat.receipt["delivered_cached_tokens"] > 1_000


async def test_request_that_no_worker_can_serve_is_rejected_with_the_reason(fronted: Suite) -> None:
    async with httpx.AsyncClient(base_url=fronted.url, timeout=60) as client:
        unknown = await ask(client, "Hello!", model="unknown")
        assert unknown.status == 404
        workers = await asyncio.to_thread(fronted.containers, "worker")
        await asyncio.to_thread(docker, "stop", *workers)
        try:
            without = await ask(client, "Hello!")
        finally:
            await asyncio.to_thread(docker, "start", *workers)
        assert without.status == 503, without
        assert without.dropped == "rejected-no-endpoints"
        assert without.retry_after
        assert json.loads(without.text)["error"]["message"]
        await asyncio.to_thread(fronted.up)
        await _recover(client)
    await assert_nothing_is_booked(fronted)


async def test_killed_picker_rejects_chats_until_it_is_back(fronted: Suite) -> None:
    (router,) = await asyncio.to_thread(fronted.containers, "router")
    async with httpx.AsyncClient(base_url=fronted.url, timeout=60) as client, PhasedLoad(client) as load:
        assert (await load.phase(16)).keys() == {200}
        load.leave()
        await asyncio.to_thread(docker, "kill", router)
        try:
            rejected = await load.phase(32)
        finally:
            load.leave()
            await asyncio.to_thread(docker, "start", router)
            await asyncio.to_thread(fronted.up)
        assert rejected.keys() == {503}, "failure_mode_allow is false"
        await _recover(client)
        assert (await load.phase(32)).keys() == {200}
    await assert_nothing_is_booked(fronted)


async def _recover(client: httpx.AsyncClient) -> None:
    """Waits until chats are answered again, eight in a row."""
    async with asyncio.timeout(120):
        row = 0
        while row < 8:
            try:
                row = row + 1 if (await ask(client, secrets.token_hex(8))).status == 200 else 0
            except (httpx.HTTPError, AssertionError):
                row = 0


@pytest.mark.parametrize("service", ["gateway", "worker"])
async def test_service_behind_envoy_is_rolled_without_a_failed_chat(fronted: Suite, service: str) -> None:
    old = await asyncio.to_thread(fronted.containers, service)
    async with ChatLoad(fronted.url) as load:
        await load.more(16)
        await asyncio.to_thread(fronted.roll, service)
        await load.more(32)
    assert load.failures == []
    assert not set(old) & set(await asyncio.to_thread(fronted.containers, service))
    await assert_nothing_is_booked(fronted)


async def test_one_of_two_pickers_is_rolled_without_a_failed_chat(fronted: Suite) -> None:
    await asyncio.to_thread(fronted.up, {"router": 2})
    try:
        async with ChatLoad(fronted.url) as load:
            await load.more(16)
            await asyncio.to_thread(fronted.roll, "router")
            await load.more(32)
        assert load.failures == []
    finally:
        await asyncio.to_thread(fronted.up)
    await assert_nothing_is_booked(fronted)


def test_envoy_runs_unprivileged_on_a_read_only_root(fronted: Suite) -> None:
    (envoy,) = fronted.containers("envoy")
    done = subprocess.run(
        ["docker", "exec", envoy, "sh", "-c", "id -u; touch /etc/envoy/x || touch /usr/local/x"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "101\n"
    assert done.returncode != 0
    found = json.loads(docker("inspect", "--format", "{{json .HostConfig}}", envoy))
    assert found["ReadonlyRootfs"] is True
    assert found["CapDrop"] == ["ALL"]
    assert found["SecurityOpt"] == ["no-new-privileges:true"]
    # Ports in hexadecimal, of sockets that listen (state 0A): Envoy's administration interface is not among them.
    sockets = [line.split() for line in fronted.execute(envoy, "cat", "/proc/net/tcp").splitlines()[1:]]
    listening = {int(local.rpartition(":")[2], 16) for _, local, _, state, *_ in sockets if state == "0A"}
    resolver = {port for port in listening if port >= 32_768}  # Docker's, in every container
    assert listening - resolver == {8000}
