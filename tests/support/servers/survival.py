"""The gateway's pipeline in the test's own loop, with workers that can be cut and postprocess replicas that can die.

All over real gRPC; only preprocess and the router are stood for, because what is under test happens after a generation
was placed.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import grpc

from services.common.base.errors import SluiceError, unavailable
from services.common.base.packing import pack_u32, unpack_u32
from services.common.base.tasks import Stop, TaskOwner
from services.common.net.ports import free_port
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from services.gateway.backends.placement.routers import ServiceRouter
from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from services.gateway.core.request import (
    Finish,
    GenerationRequest,
    PositionLogprobs,
    Role,
    Route,
    SamplingParams,
    StopParams,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
)
from services.gateway.metrics import GatewayMetrics
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.models import Pipelines
from services.gateway.pipeline.pipeline import Pipeline
from services.gateway.pipeline.stages import Components
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.migration_policy import MigrationPolicy
from services.postprocess import service as postprocess
from services.postprocess.settings import PostprocessSettings
from services.postprocess.streams.factory import StreamFactory
from services.postprocess.streams.session import SessionLimits
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry
from services.worker.engines.mock.vocabulary import MockVocabulary, load_vocabulary
from services.worker.server import WorkerServer
from sluice.v1 import postprocess_pb2, postprocess_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.servers.workers import hosted
from tests.support.waiting import until

WAIT_S = 60
CONTEXT = 4096


class Knife:
    """Cuts a worker's session when it has sent so many tokens in all; None never."""

    def __init__(self) -> None:
        self.after: int | None = None
        self.cuts = 0

    def set(self, after: int | None) -> None:
        self.after = after


class _CutContext:
    """A session's context that breaks in the middle of a message, as a dying process does."""

    def __init__(self, context: Any, knife: Knife) -> None:
        self._context = context
        self._knife = knife
        self._broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def done(self) -> bool:
        return self._broken or self._context.done()

    async def write(self, batch: worker_pb2.TokenBatch) -> None:
        left = self._knife.after
        if left is None:
            await self._context.write(batch)
            return
        slots, counts, ids = unpack_u32(batch.slots), unpack_u32(batch.counts), unpack_u32(batch.token_ids)
        last = any(extra.finish_reason for extra in batch.extras)
        if sum(counts) < left or (sum(counts) == left and not last):
            self._knife.after = left - sum(counts)
            await self._context.write(batch)
            return
        kept = array("I")
        for count in counts:
            kept.append(min(count, left))
            left -= kept[-1]
        await self._context.write(
            worker_pb2.TokenBatch(
                slots=pack_u32(slots),
                counts=pack_u32(kept),
                token_ids=pack_u32(_first(ids, counts, kept)),
                extras=_cut_extras(batch.extras, slots, kept),
            )
        )
        self._knife.after = None
        self._knife.cuts += 1
        self._broken = True
        await self._context.abort(grpc.StatusCode.UNAVAILABLE, "cut")


def _cut_extras(
    extras: Sequence[worker_pb2.TokenExtra], slots: Sequence[int], kept: Sequence[int]
) -> list[worker_pb2.TokenExtra]:
    """Returns the extras of the kept tokens and of the prompt, without text and ends."""
    tokens: Counter[int] = Counter()
    for slot, count in zip(slots, kept, strict=True):
        tokens[slot] += count
    left = []
    for extra in extras:
        positions = extra.logprobs[: tokens[extra.slot]]
        tokens[extra.slot] -= len(positions)
        one = worker_pb2.TokenExtra(
            slot=extra.slot,
            logprobs=positions,
            prompt_logprobs=extra.prompt_logprobs,
            prompt_token_ids=extra.prompt_token_ids,
        )
        if extra.HasField("cached_tokens"):
            one.cached_tokens = extra.cached_tokens
        left.append(one)
    return left


def _first(ids: array[int], counts: Sequence[int], kept: Sequence[int]) -> array[int]:
    """Of each row's ids, as many as are kept."""
    left, start = array("I"), 0
    for count, number in zip(counts, kept, strict=True):
        left += ids[start : start + number]
        start += count
    return left


class _CutService(worker_pb2_grpc.WorkerServicer):
    def __init__(self, host: WorkerServer, knife: Knife) -> None:
        self._host = host
        self._knife = knife

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await self._host.service.Session(request_iterator, cast(Any, _CutContext(context, self._knife)))


@asynccontextmanager
async def cuttable(host: WorkerServer, knife: Knife) -> AsyncIterator[str]:
    """host:port of a server in front of a worker, whose sessions the knife cuts."""
    server = GrpcServer(GrpcServiceSettings(listen="127.0.0.1:0"), worker_pb2.DESCRIPTOR)
    worker_pb2_grpc.add_WorkerServicer_to_server(cast(Any, _CutService)(host, knife), server.server)
    await server.start()
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


class PostReplica:
    """A postprocess replica that can be killed, started again on its port, and drained."""

    def __init__(self, folder: Path, models: Sequence[str] = ("tiny",)) -> None:
        self._models = [f"{model}={folder}" for model in models]
        self.port = free_port()
        self.server: GrpcServer | None = None
        self.service: postprocess.PostprocessService | None = None

    async def start(self) -> None:
        settings = PostprocessSettings(listen=f"127.0.0.1:{self.port}", models=self._models)
        library, limits = VocabularyRegistry(settings.served, 60), SessionLimits()
        await library.load_all()
        self.service = postprocess.PostprocessService(library, limits, StreamFactory(limits.stream))
        self.server = GrpcServer(settings, postprocess_pb2.DESCRIPTOR)
        postprocess_pb2_grpc.add_PostprocessServicer_to_server(self.service, self.server.server)
        await self.server.start()
        self.port = self.server.port
        await self.server.set_serving(True)

    async def kill(self) -> None:
        """Breaks every session at once; nothing is said any more."""
        server, self.server = self.server, None
        if server is not None:
            await server.stop(0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


class Bookings:
    """Stands for the router: the first worker that is allowed, and every booking counted."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        self.made = 0
        self.order: list[str] = []
        self.roles: dict[str, Role] = {}
        self.models: dict[str, str] = {}
        self.skipped = ""
        self.last: tuple[str, str] = ("", "")

    async def route(self, request_id: str, model: str, prompt: TokenizedPrompt, block_size: int, **more: Any) -> Route:
        allowed = more["candidates"]
        serving = [name for name in self.order if self.models.get(name, model) == model]
        chosen = [name for name in serving if allowed is None or name in allowed]
        if not chosen:
            raise unavailable("No worker.", code="no_workers")
        prefill = next((name for name in chosen if self.roles.get(name) is Role.PREFILL), "")
        answering = [name for name in chosen if self.roles.get(name) is not Role.PREFILL]
        decode = next((name for name in answering if self.roles.get(name) is Role.DECODE), "")
        if more["require_pair"] and not (prefill and decode):
            raise unavailable("No pair, as --disaggregation require needs.", code="no_prefill_workers")
        if not answering:
            raise unavailable("No worker.", code="no_workers")
        alone = more["role"] is Role.AGGREGATED or prompt.length <= more["bypass_uncached_tokens"]
        pair = bool(prefill and decode) and not alone and not self.skipped
        self.last = (prefill, decode) if pair else ("", answering[0])
        reservation = ""
        if more["book"]:
            self.made += 1
            reservation = f"{request_id}#{self.made}"
            self.alive.add(reservation)
        return Route(
            self.last[1], reservation_id=reservation, prefill_worker_id=self.last[0], prefill_skipped=self.skipped
        )

    def prefill_complete(self, reservation_id: str) -> None:
        assert reservation_id in self.alive

    def free(self, reservation_id: str, cached_tokens: int | None = None, output_tokens: int = 0) -> None:
        self.alive.remove(reservation_id)


class _Preprocess:
    def __init__(self, vocabulary: MockVocabulary) -> None:
        self._vocabulary = vocabulary

    async def tokenize(self, model: str, prompt: Any, *rest: Any) -> TokenizedPrompt:
        eos = pack_u32(self._vocabulary.eos_ids)
        ids = prompt.token_ids if isinstance(prompt, TokenPrompt) else pack_u32(self._vocabulary.encode(prompt.text))
        return TokenizedPrompt(ids, b"", "", eos, eos, CONTEXT, b"")


@dataclass
class ObservedStream:
    """What a client got: everything it can tell apart, but not in which pieces."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    pieces: list[tuple[bytes, int]] = field(default_factory=list)
    finish: Finish | None = None
    error: SluiceError | None = None
    usage: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def comparable(self) -> ObservedStream:
        """Without what says that something happened on the way."""
        finish = self.finish and replace(self.finish, degraded=(), migrations=0)
        return replace(self, finish=finish)


class Client:
    """A sink that waits for the end."""

    def __init__(self) -> None:
        self.heard = ObservedStream()
        self.over = asyncio.Event()
        self.pieces = 0

    def text(self, piece: str) -> None:
        self.pieces += 1
        self.heard.text += piece

    def reasoning(self, piece: str) -> None:
        self.heard.reasoning += piece

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        if name:
            assert call not in self.heard.calls, "a call began twice"
            self.heard.calls[call] = [call_id, name, ""]
        self.heard.calls[call][2] += arguments

    def logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        self.heard.logprobs += positions

    def prompt_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        assert not self.heard.prompt_logprobs, "the prompt's came twice"
        self.heard.prompt_logprobs += positions

    def tokens(self, pieces: Sequence[bytes], offsets: Sequence[int]) -> None:
        self.heard.pieces += zip(pieces, offsets, strict=True)

    def finish(self, finish: Finish) -> None:
        assert not self.over.is_set()
        self.heard.finish = finish
        self.over.set()

    def fail(self, error: SluiceError) -> None:
        assert not self.over.is_set()
        self.heard.error = error
        self.over.set()


class Stage:
    """A running pipeline."""

    def __init__(
        self, pipeline: Pipeline, reservations: Bookings, hosts: list[WorkerServer], knives: list[Knife]
    ) -> None:
        self.pipeline = pipeline
        self.reservations = reservations
        self.hosts = hosts
        self.knives = knives
        self.replicas: list[PostReplica] = []
        self.pipelines: Pipelines

    @property
    def texts_connected(self) -> int:
        """Postprocess replicas that could be given a stream now."""
        return sum(link.connected for link in self.pipeline.stream_manager.texts.links.values())

    @property
    def fewest_texts(self) -> int:
        """Streams of the postprocess replica that has least of them."""
        return min(link.live for link in self.pipeline.stream_manager.texts.links.values())

    async def ask(self, request: GenerationRequest) -> ObservedStream:
        """One request to its end."""
        client = Client()
        generation = await self.pipelines.of(request.model).start(request, [cast(Any, client)])
        await asyncio.wait_for(client.over.wait(), WAIT_S)
        client.heard.usage = (
            generation.prompt_tokens,
            generation.completion_tokens,
            generation.reasoning_tokens,
            generation.cached_tokens,
        )
        return client.heard

    async def quiet(self) -> None:
        """Waits until nothing is left anywhere; fails when something stays."""
        await until(lambda: not self.left())

    def left(self) -> dict[str, int]:
        """What is still held, by whom; empty when all is given back."""
        stream_manager = self.pipeline.stream_manager
        held = {
            "streams": stream_manager.live,
            "waiting": len(stream_manager.texts.waiting),
            "reservations": len(self.reservations.alive),
            "links": sum(link.live for link in stream_manager.texts.links.values()),
            "workers": sum(host.worker.live_requests for host in self.hosts),
            "texts": sum(
                len(session) for replica in self.replicas if replica.service for session in replica.service._sessions
            ),
        }
        return {name: number for name, number in held.items() if number}


@asynccontextmanager
async def staged(
    folder: Path,
    workers: int = 2,
    replicas: int = 1,
    policy: MigrationPolicy | None = None,
    post_wait_s: float = 10.0,
    roles: Sequence[str] = (),
    models: Sequence[str] = (),
    config: PipelineConfig | None = None,
    model_grace_s: float = 300.0,
    **worker_fields: Any,
) -> AsyncIterator[Stage]:
    """A pipeline with workers `w0`, `w1`, … (chosen in this order) and postprocess replicas, all connected.

    Args:
        roles: of the workers, in place of their number; aggregated without.
        models: served by the workers, in place of their number; `tiny` without.
    """
    async with AsyncExitStack() as stack:
        died = Stop()
        tasks = TaskOwner(died.fail)
        parts = list(roles) or ["aggregated"] * (len(models) or workers)
        served = list(models) or ["tiny"] * len(parts)
        hosts = [
            await stack.enter_async_context(hosted(folder, role=role, **{"model": f"{model}={folder}"} | worker_fields))
            for role, model in zip(parts, served, strict=True)
        ]
        knives = [Knife() for _ in hosts]
        posts = [PostReplica(folder, sorted(set(served))) for _ in range(replicas)]
        for post in posts:
            await post.start()
            stack.push_async_callback(post.kill)
        reservations = Bookings()
        metrics = GatewayMetrics()
        policy = policy or MigrationPolicy()
        stream_manager = StreamManager(10_000, reservations, metrics, post_wait_s)
        config = config or PipelineConfig(migration=policy.enabled)
        makes_text = config.any_replicas_make_text
        connections = ConnectionManager(
            [post.address for post in posts], None, 3.0, stream_manager, tasks, makes_text=makes_text
        )
        registry = WorkerRegistry(cast(Any, None), connections.worker_up, connections.worker_down)
        router = ServiceRouter(cast(RouterClient, reservations), 5.0)
        preprocess = cast(PreprocessClient, _Preprocess(load_vocabulary(folder, "hf")))
        pipelines = Pipelines(
            config,
            Components(
                preprocess,
                router,
                reservations,
                registry,
                connections,
                stream_manager,
                metrics,
                tasks,
                policy,
                post_wait_s,
            ),
            model_grace_s,
        )
        await connections.postprocess.start()
        stack.push_async_callback(connections.postprocess.close)
        stack.push_async_callback(tasks.close)
        tasks.spawn(connections.run_sweeps(), "sweeps")
        for number, (host, knife) in enumerate(zip(hosts, knives, strict=True)):
            address = await stack.enter_async_context(cuttable(host, knife))
            reservations.order.append(f"w{number}")
            reservations.models[f"w{number}"] = served[number]
            capabilities = frozenset(str(one) for one in host.worker.config.capabilities)
            role = reservations.roles[f"w{number}"] = Role[parts[number].upper()]
            entry = WorkerEntry(f"w{number}", address, 1, served[number], 16, CONTEXT, 0, capabilities, 0, role=role)
            registry._up(entry)
        tasks.spawn(pipelines.run(), "models")
        stage = Stage(pipelines.of("tiny"), reservations, hosts, knives)
        stage.replicas = posts
        stage.pipelines = pipelines
        expected = replicas if makes_text else 0
        await until(lambda: connections.connected_workers == len(parts) and stage.texts_connected == expected)
        yield stage
        assert not died.failed, "a background task of the gateway died"


def asking(name: str, text: str, model: str = "tiny", **more: Any) -> GenerationRequest:
    """A request for one choice; keywords as GenerationRequest has them."""
    fields: dict[str, Any] = {"sampling": SamplingParams(seed=7), "stop": StopParams(max_tokens=400), **more}
    return GenerationRequest(name, model, TextPrompt(text), 1, **fields)
