"""Client of a running suite: its gateway over HTTP, its router over gRPC."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.base.errors import SluiceError, sentence
from services.common.rpc.channels import open_channel
from services.common.rpc.health import CLOCK_KEY, VERSION_KEY
from services.common.rpc.replicas import ReplicaSet
from services.gateway.backends.workers.overview import WorkerState, worker_states
from sluice.cli.errors import BadFlag
from sluice.cli.live.endpoint import DEFAULT_GATEWAY, DEFAULT_ROUTER, Endpoint
from sluice.v1 import router_pb2, router_pb2_grpc

TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
UNREACHABLE = "UNREACHABLE"
MAX_REASON_LENGTH = 200
"""Characters of a reason why a service cannot be reached; the rest is cut off."""
STATE_FIELDS = ["version", "unix_ms", "nodes", "rates", "workers", "hidden_workers", "requests", "degraded", "history"]


class NotReached(BadFlag):
    """Raised if a service cannot be reached or its response is invalid; the message is one sentence with advice."""


@dataclass(frozen=True)
class Seen:
    """Status reported by a gRPC server.

    Attributes:
        health: name of its serving status, or of the error; UNREACHABLE means no response.
        version: version of Sluice; empty if not reported.
        ahead_s: seconds by which its clock is ahead of this machine's; None if not reported.
        reason: why it is UNREACHABLE.
    """

    health: str
    version: str = ""
    ahead_s: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class RouteCandidate:
    """The router's score of a worker: cost and loads in blocks, overlap as device, host, disk and predicted."""

    worker: str
    rank: int
    cost: float
    overlap: tuple[int, int, int, int]
    prefill_blocks: float
    decode_blocks: float


@dataclass(frozen=True)
class RouteVerdict:
    """A routing decision; `scores` has the cheapest first."""

    model: str
    worker: str
    address: str
    prefill_worker: str
    prompt_tokens: int
    tokens_to_compute: int
    index_age_ms: int
    degraded: str
    scores: Sequence[RouteCandidate]


class Running:
    """Queries a suite; create it with `reached`."""

    def __init__(
        self, endpoint: Endpoint, http: httpx.AsyncClient, credentials: grpc.ChannelCredentials | None
    ) -> None:
        self.endpoint = endpoint
        self.credentials = credentials
        self._http = http
        self._problem = ""  # why the gateway did not report its router
        self._routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub] | None = None

    async def get(self, path: str, *fields: str) -> Any:
        """Returns a JSON object of the gateway with at least these fields; raises NotReached otherwise."""
        return await self._request("GET", path, fields)

    async def state(self) -> dict[str, Any]:
        """Returns the state of the live view, with `answered_unix_ms` by this machine's clock.

        Raises:
            NotReached: the gateway cannot be reached, or the live view is off.
        """
        state: dict[str, Any] = await self._request("GET", "/ui/data/state", STATE_FIELDS)
        return {**state, "answered_unix_ms": int(time.time() * 1000)}

    async def deltas(self) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yields the live view's stream: ("whole", state), then ("message", delta) every second.

        Raises:
            NotReached: the stream was interrupted.
        """
        try:
            async with self._http.stream("GET", "/ui/data/stream", timeout=httpx.Timeout(TIMEOUT_S)) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise _refusal(answer)
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    raise self._not_a_gateway()
                kind = "message"
                async for line in answer.aiter_lines():
                    if line.startswith("event: "):
                        kind = line[7:]
                    elif line.startswith("data: "):
                        yield kind, json.loads(line[6:])
                        kind = "message"
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    async def tokens(self, text: str, model: str, raw: bool) -> list[int]:
        """Returns the ids of a user's message, or of plain text, as tokenized by the gateway."""
        body: dict[str, Any] = {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
        answer = await self._request("POST", "/tokenize", ("tokens",), {"model": model, **body})
        return list(answer["tokens"])

    async def workers(self) -> Sequence[WorkerState]:
        """Returns all workers that the router lists."""
        try:
            return await worker_states(await self.routers(), TIMEOUT_S)
        except SluiceError as error:
            raise NotReached(f"The router reports: {error.message}") from error

    async def route(self, model: str, prompt: router_pb2.PromptRef, cache_salt: str = "") -> RouteVerdict:
        """Returns where this prompt would be routed, without a reservation."""
        request = router_pb2.RouteQueryRequest(
            mode=router_pb2.RouteQueryRequest.MODE_QUERY_ONLY,
            model=model,
            prompt=prompt,
            cache_salt=cache_salt,
            explain=True,
        )
        try:
            answer = await (await self.routers()).call(lambda stub: stub.RouteQuery, request, TIMEOUT_S)
        except SluiceError as error:
            raise NotReached(f"The router reports: {error.message}") from error
        return _verdict(model, prompt, answer)

    async def routers(self) -> ReplicaSet[router_pb2_grpc.RouterAsyncStub]:
        """Returns the router replicas; raises NotReached if none is ready."""
        if self._routers is None:
            targets = await self.router_addresses()
            routers = ReplicaSet("router", targets, router_pb2_grpc.RouterStub, self.credentials)
            await routers.start()
            self._routers = routers
            if not await routers.wait_ready(CONNECT_TIMEOUT_S):
                raise NotReached(
                    f"{self._problem}No router responds at {', '.join(targets)}. Start it, or pass its address with "
                    "--router and its authority with --tls."
                )
        return self._routers

    async def router_addresses(self) -> Sequence[str]:
        """Returns the address of the flag, else those that the gateway reports, else the default one.

        The default applies only to the default gateway: the router of another gateway is not the one on this machine.

        Raises:
            NotReached: no address is known.
        """
        if self.endpoint.router:
            return [self.endpoint.router]
        try:
            serving: Sequence[str] = (await self.state())["nodes"]["router"]["serving"]
        except NotReached as error:
            if self.endpoint.gateway.rstrip("/") != DEFAULT_GATEWAY:
                raise NotReached(
                    f"{error} The address of the router is unknown as well; pass it with --router."
                ) from error
            self._problem = f"{error} "
            return [DEFAULT_ROUTER]
        if not serving:
            raise NotReached("The gateway is not connected to a router; pass the address of one with --router.")
        return serving

    async def status_of(self, address: str) -> Seen:
        """Returns the health, version and clock difference of a server; a lost connection is opened once more."""
        status = await self._ask_status(address)
        return status if status.health != UNREACHABLE else await self._ask_status(address)

    async def _ask_status(self, address: str) -> Seen:
        channel = open_channel(address, self.credentials)
        try:
            call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CONNECT_TIMEOUT_S)
            sent_s = time.time()
            answer = await call
            received_s = time.time()
            trailers = {key: str(value) for key, value in await call.trailing_metadata() or ()}
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return Seen(UNREACHABLE, reason=sentence(error.details() or "no response", MAX_REASON_LENGTH))
            return Seen(error.code().name)
        finally:
            await channel.close()
        health = str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
        if CLOCK_KEY not in trailers:
            return Seen(health, trailers.get(VERSION_KEY, ""))
        # A clock reading between request and response counts as equal.
        server_s = int(trailers[CLOCK_KEY]) / 1000
        return Seen(health, trailers.get(VERSION_KEY, ""), server_s - min(max(server_s, sent_s), received_s))

    async def close(self) -> None:
        """Closes the connections to the router."""
        if self._routers is not None:
            await self._routers.close()

    async def _request(
        self, method: str, path: str, fields: Sequence[str], body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code >= 400 and path != "/ready":
            raise _refusal(answer)
        try:
            body_json = answer.json()
        except ValueError as error:
            raise self._not_a_gateway() from error
        if not isinstance(body_json, dict) or not body_json.keys() >= set(fields):
            raise self._not_a_gateway()
        return body_json

    def _not_a_gateway(self) -> NotReached:
        return NotReached(f"{self.endpoint.gateway} is not a Sluice gateway; pass the URL of one with --gateway.")

    def _unreachable(self, error: httpx.HTTPError) -> NotReached:
        problem = str(error).rstrip(".") or type(error).__name__
        return NotReached(
            f"The gateway at {self.endpoint.gateway} cannot be reached: {problem}. Pass its URL with --gateway, and "
            "its authority with --tls."
        )


@asynccontextmanager
async def reached(endpoint: Endpoint) -> AsyncIterator[Running]:
    """Opens a client of a suite; nothing is sent before the first query."""
    endpoint.check()
    headers = {"authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    credentials = endpoint.credentials()
    async with httpx.AsyncClient(
        base_url=endpoint.gateway, headers=headers, timeout=timeout, verify=endpoint.trust.context(), trust_env=False
    ) as http:
        running = Running(endpoint, http, credentials)
        try:
            yield running
        finally:
            await running.close()


def _refusal(answer: httpx.Response) -> NotReached:
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {answer.status_code}."
    hint = " Pass --api-key." if answer.status_code == 401 else ""
    return NotReached(f"The gateway reports: {message}{hint}")


def _verdict(model: str, prompt: router_pb2.PromptRef, answer: router_pb2.RouteQueryResponse) -> RouteVerdict:
    return RouteVerdict(
        model=model,
        worker=answer.decode.worker_id,
        address=answer.decode.address,
        prefill_worker=answer.prefill.worker_id,
        prompt_tokens=prompt.prompt_tokens or len(prompt.token_ids) // 4,
        tokens_to_compute=answer.tokens_to_compute,
        index_age_ms=answer.index_age_ms,
        degraded=answer.degraded,
        scores=[_candidate(score) for score in answer.scores],
    )


def _candidate(score: router_pb2.CandidateScore) -> RouteCandidate:
    held = score.overlap
    return RouteCandidate(
        score.worker_id,
        score.data_parallel_rank,
        score.cost,
        (held.device_blocks, held.host_blocks, held.disk_blocks, held.predicted_blocks),
        score.prefill_blocks,
        score.decode_blocks,
    )
