"""A running suite as the command line reaches it: its gateway over HTTP, its router over gRPC."""

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

from services.common.errors import SluiceError
from services.common.rpc.channels import open_channel
from services.common.rpc.health import CLOCK_KEY, VERSION_KEY
from services.common.rpc.replicas import ReplicaSet
from services.gateway.workers.overview import WorkerState, worker_states
from sluice.cli.live.endpoint import USUAL_GATEWAY, USUAL_ROUTER, Endpoint
from sluice.v1 import router_pb2, router_pb2_grpc

ANSWER_S = 10.0
REACH_S = 3.0
STATE_FIELDS = ["version", "unix_ms", "nodes", "rates", "workers", "hidden_workers", "requests", "degraded", "history"]


class NotReached(Exception):
    """Somebody does not answer as asked; the text is one sentence that says what to do."""


@dataclass(frozen=True)
class Seen:
    """What a gRPC server says of itself.

    Attributes:
        health: "SERVING" and its kin, or how it failed; UNREACHABLE is no answer at all.
        version: of Sluice; empty: it does not say.
        ahead_s: how far its clock is before this machine's, seconds; None: it does not say.
    """

    health: str
    version: str = ""
    ahead_s: float | None = None


@dataclass(frozen=True)
class Candidate:
    """What the router thinks of a worker: cost and loads in blocks, overlap as device, host, disk and predicted."""

    worker: str
    rank: int
    cost: float
    overlap: tuple[int, int, int, int]
    prefill_blocks: float
    decode_blocks: float


@dataclass(frozen=True)
class Verdict:
    """Where a prompt would go. `scores` has the cheapest first."""

    model: str
    worker: str
    address: str
    prefill_worker: str
    prompt_tokens: int
    tokens_to_compute: int
    index_age_ms: int
    degraded: str
    scores: Sequence[Candidate]


class Running:
    """Asks a suite; use `reached`."""

    def __init__(self, place: Endpoint, http: httpx.AsyncClient, credentials: grpc.ChannelCredentials | None) -> None:
        self.place = place
        self.credentials = credentials
        self._http = http
        self._problem = ""  # why the gateway does not say where the router is
        self._routers: ReplicaSet[router_pb2_grpc.RouterAsyncStub] | None = None

    async def get(self, path: str, *fields: str) -> Any:
        """A JSON object of the gateway with at least these fields; NotReached with what it says instead."""
        return await self._ask("GET", path, fields)

    async def state(self) -> dict[str, Any]:
        """What the live view shows, with `answered_unix_ms` by this machine's clock; NotReached when it is off."""
        state: dict[str, Any] = await self._ask("GET", "/ui/data/state", STATE_FIELDS)
        return {**state, "answered_unix_ms": int(time.time() * 1000)}

    async def deltas(self) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """The live view's stream: ("whole", state), then ("message", delta) a second; NotReached when it breaks off."""
        try:
            async with self._http.stream("GET", "/ui/data/stream", timeout=httpx.Timeout(ANSWER_S)) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise _refusal(answer)
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    raise self._stranger()
                kind = "message"
                async for line in answer.aiter_lines():
                    if line.startswith("event: "):
                        kind = line[7:]
                    elif line.startswith("data: "):
                        yield kind, json.loads(line[6:])
                        kind = "message"
        except httpx.HTTPError as error:
            raise self._gone(error) from error

    async def tokens(self, text: str, model: str, raw: bool) -> list[int]:
        """The ids that the gateway's preprocess makes of a user's message, or of plain text."""
        body: dict[str, Any] = {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
        answer = await self._ask("POST", "/tokenize", ("tokens",), {"model": model, **body})
        return list(answer["tokens"])

    async def workers(self) -> Sequence[WorkerState]:
        """Every worker that the router lists."""
        try:
            return await worker_states(await self.routers(), ANSWER_S)
        except SluiceError as error:
            raise NotReached(f"The router says: {error.message}") from error

    async def route(self, model: str, prompt: router_pb2.PromptRef, cache_salt: str = "") -> Verdict:
        """Where this prompt would go; books nothing."""
        request = router_pb2.RouteQueryRequest(
            mode=router_pb2.RouteQueryRequest.MODE_QUERY_ONLY,
            model=model,
            prompt=prompt,
            cache_salt=cache_salt,
            explain=True,
        )
        try:
            answer = await (await self.routers()).call(lambda stub: stub.RouteQuery, request, ANSWER_S)
        except SluiceError as error:
            raise NotReached(f"The router says: {error.message}") from error
        return _verdict(model, prompt, answer)

    async def routers(self) -> ReplicaSet[router_pb2_grpc.RouterAsyncStub]:
        """The router replicas; NotReached when none is ready."""
        if self._routers is None:
            targets = await self.router_addresses()
            routers = ReplicaSet("router", targets, router_pb2_grpc.RouterStub, self.credentials)
            await routers.start()
            self._routers = routers
            if not await routers.wait_ready(REACH_S):
                raise NotReached(
                    f"{self._problem}No router answers at {', '.join(targets)}. Is it running? --router says where it "
                    "is, --tls what it trusts."
                )
        return self._routers

    async def router_addresses(self) -> Sequence[str]:
        """As the flag says, else as the gateway does, else the usual one; but that belongs to the usual gateway only:
        of another one NotReached, as its router is not the one that may run here."""
        if self.place.router:
            return [self.place.router]
        try:
            serving: Sequence[str] = (await self.state())["nodes"]["router"]["serving"]
        except NotReached as error:
            if self.place.gateway.rstrip("/") != USUAL_GATEWAY:
                raise NotReached(f"{error} Nor is it known where the router is; --router says it.") from error
            self._problem = f"{error} "
            return [USUAL_ROUTER]
        if not serving:
            raise NotReached("The gateway reaches no router. --router says where one is.")
        return serving

    async def look(self, address: str) -> Seen:
        """What a server says of its health, its version and its clock."""
        channel = open_channel(address, self.credentials)
        try:
            call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=REACH_S)
            asked_s = time.time()
            answer = await call
            answered_s = time.time()
            said = {key: str(value) for key, value in await call.trailing_metadata() or ()}
        except grpc.aio.AioRpcError as error:
            return Seen("UNREACHABLE" if error.code() is grpc.StatusCode.UNAVAILABLE else error.code().name)
        finally:
            await channel.close()
        health = str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
        if CLOCK_KEY not in said:
            return Seen(health, said.get(VERSION_KEY, ""))
        there_s = int(said[CLOCK_KEY]) / 1000  # as good as equal, when it is between question and answer
        return Seen(health, said.get(VERSION_KEY, ""), there_s - min(max(there_s, asked_s), answered_s))

    async def close(self) -> None:
        """Lets go of the router."""
        if self._routers is not None:
            await self._routers.close()

    async def _ask(
        self, method: str, path: str, fields: Sequence[str], body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._gone(error) from error
        if answer.status_code >= 400 and path != "/ready":
            raise _refusal(answer)
        try:
            said = answer.json()
        except ValueError as error:
            raise self._stranger() from error
        if not isinstance(said, dict) or not said.keys() >= set(fields):
            raise self._stranger()
        return said

    def _stranger(self) -> NotReached:
        return NotReached(
            f"{self.place.gateway} answers, but not as a Sluice gateway does. --gateway says where it is."
        )

    def _gone(self, error: httpx.HTTPError) -> NotReached:
        problem = str(error).rstrip(".") or type(error).__name__
        return NotReached(
            f"The gateway at {self.place.gateway} cannot be reached: {problem}. --gateway says where it is, --tls what "
            "it trusts."
        )


@asynccontextmanager
async def reached(place: Endpoint) -> AsyncIterator[Running]:
    """A suite to ask; nothing is sent before the first question."""
    place.check()
    headers = {"authorization": f"Bearer {place.api_key}"} if place.api_key else {}
    timeout = httpx.Timeout(ANSWER_S, connect=REACH_S)
    credentials = place.credentials()
    async with httpx.AsyncClient(
        base_url=place.gateway, headers=headers, timeout=timeout, verify=place.trust.context(), trust_env=False
    ) as http:
        running = Running(place, http, credentials)
        try:
            yield running
        finally:
            await running.close()


def _refusal(answer: httpx.Response) -> NotReached:
    try:
        said = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = f"it answers {answer.status_code}."
    hint = " Give --api-key." if answer.status_code == 401 else ""
    return NotReached(f"The gateway says: {said}{hint}")


def _verdict(model: str, prompt: router_pb2.PromptRef, answer: router_pb2.RouteQueryResponse) -> Verdict:
    return Verdict(
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


def _candidate(score: router_pb2.CandidateScore) -> Candidate:
    held = score.overlap
    return Candidate(
        score.worker_id,
        score.data_parallel_rank,
        score.cost,
        (held.device_blocks, held.host_blocks, held.disk_blocks, held.predicted_blocks),
        score.prefill_blocks,
        score.decode_blocks,
    )
