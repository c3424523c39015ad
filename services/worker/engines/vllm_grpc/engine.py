"""The engine: a client of one `vllm serve --grpc`, which it starts itself unless it is given an address."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import grpc

from services.common import models
from services.common.errors import ErrorKind, SluiceError, invalid
from services.common.net.ports import free_port
from services.worker.engines import crash_reason as crash_reason
from services.worker.engines.contract.capabilities import Capability
from services.worker.engines.contract.engine import Embedded, EngineConfig, GenerateContext, LLMEngine, Load
from services.worker.engines.contract.generation import Delta, FinishReason, GenerateRequest, Role
from services.worker.engines.vllm.handoff import read_handoff
from services.worker.engines.vllm.options import kv_events_config
from services.worker.engines.vllm.sampling import Facts
from services.worker.engines.vllm_grpc import card, tokenizer, wire
from services.worker.engines.vllm_grpc.client import Client, error_of
from services.worker.engines.vllm_grpc.feed import GrpcFeed
from services.worker.engines.vllm_grpc.options import LOOPBACK, read_server_options, serve_command
from services.worker.engines.vllm_grpc.reading import Reading
from services.worker.engines.vllm_grpc.server import Server, find_program
from services.worker.kv_events.cache_events import KvEventSource
from services.worker.kv_events.source import EngineCacheSource
from services.worker.serving.compiling import naming_constraint
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

POLL_S = 0.5
SUBSCRIBE_S = 10.0
EMBED_S = 120.0
FAILURES = 2
LOOKS, LOOK_AGAIN_S = 10, 0.1


class VllmGrpcEngine(LLMEngine):
    """Each generation is a stream of its own to the server, for that is the server's interface."""

    CAPABILITIES: ClassVar[frozenset[Capability]] = card.CAPABILITIES

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._options = read_server_options(settings, settings.spec.source)
        self._server = Server()
        self._client: Client | None = None
        self._config: EngineConfig | None = None
        self._facts = Facts(0)
        self._prefix = ""
        self._loads: Sequence[Load] = [Load()]
        self._sources: tuple[EngineCacheSource, ...] = ()

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        self._prefix = f"{worker_id}:"
        address = self._options.address or await self._start_server()
        self.on_phase("waiting for vLLM's server", None)
        self._client = client = Client(address)
        await self._until_healthy(client)
        model, server, loads = await client.model_info(), await client.server_info(), await client.loads()
        self._check_role(server)
        self._facts = card.request_facts(model)
        self.on_phase("reading the model's files", None)
        path, source = await self._files(client)
        found = {
            "has_events": bool(model.is_generation) and await self._follow_events(client, server),
            "profiles": self._options.profiles,
        }
        self._config = await asyncio.to_thread(
            card.engine_config, self._settings, path, source, model, server, loads, **found
        )
        self._loads = [Load() for _ in range(self._config.data_parallel_size)]
        self.tasks.spawn(self._watch(client), "vllm-grpc-watch")
        return self._config

    async def _start_server(self) -> str:
        self.on_phase("starting vLLM's server", None)
        folder = await asyncio.to_thread(self._server.make_folder)
        port = free_port()  # vLLM cannot be told to choose one and say which
        command = serve_command(
            find_program(self._options.program), self._options.flags, port, kv_events_config(folder, 1)
        )
        await self._server.start(command)
        return f"{LOOPBACK}:{port}"

    async def _until_healthy(self, client: Client) -> None:
        deadline = time.monotonic() + self._options.start_s
        ended = None if self._options.address else asyncio.ensure_future(self._server.wait())
        try:
            while True:
                try:
                    if await client.healthy():
                        return
                except SluiceError as error:
                    if error.kind is ErrorKind.FAILED_PRECONDITION:
                        raise
                if ended is not None and ended.done():
                    missing = crash_reason.missing_from(self._settings.spec.source)
                    raise invalid(
                        missing or f"vLLM's server ended with {ended.result()} before it was ready; its log says why.",
                        param="model" if missing else "engine_args",
                    )
                if time.monotonic() > deadline:
                    raise SluiceError(ErrorKind.CANNOT_CONNECT, "vLLM's server does not answer.", param="engine_args")
                await asyncio.sleep(POLL_S)
        finally:
            if ended is not None:
                ended.cancel()

    def _check_role(self, server: Any) -> None:
        if self._settings.role != "aggregated" and not server.kv_connector:
            raise invalid(
                f"vLLM's server has no KV connector, which the role {self._settings.role} needs; start it with "
                "--kv-transfer-config.",
                param="role",
            )

    async def _files(self, client: Client) -> tuple[Path, str]:
        """The tokenizer's files and their name on the card: from here, or else from the server."""
        source = self._settings.spec.source
        try:
            return await asyncio.to_thread(models.resolve, source), source
        except SluiceError as error:
            if error.kind is not ErrorKind.NOT_FOUND or not self._options.address:
                raise
        folder = Path(await asyncio.to_thread(self._server.make_folder))
        return await tokenizer.fetch_into(client, folder), str(folder)

    async def _follow_events(self, client: Client, server: Any) -> bool:
        """Follows the cache of every rank, if the server tells of it."""
        if not server.block_size:
            return False
        ranks = range(max(int(server.data_parallel_size), 1))
        self._sources = tuple(
            EngineCacheSource(rank, int(server.block_size), counts_copies=True, can_replay=False) for rank in ranks
        )
        opened = asyncio.Event()
        feed = GrpcFeed(client, self._sources, opened.set)
        following = self.tasks.spawn(feed.run(), "vllm-grpc-kv-events")
        try:
            async with asyncio.timeout(SUBSCRIBE_S):
                await opened.wait()
        except TimeoutError:
            following.cancel()
            self._sources = ()
            log.warning("vLLM's server tells nothing about its cache; start it with --kv-events-config")
            return False
        return True

    async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        client = self._started()
        if not self._takes_generations():
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "This worker computes embeddings only.",
                param="model",
                code="unsupported_by_engine",
            )
        split = request.disaggregation
        handoff = None
        if split is not None and split.role is Role.DECODE and split.handoff:
            handoff = read_handoff(split.handoff)
        message = wire.write_request(request, self._facts, handoff)
        message.request_id = self._prefix + request.request_id
        reading = Reading(request)
        call = client.generate(message)
        try:
            async for response in call:
                if (delta := reading.take(response)) is not None:
                    if delta.finish_reason is FinishReason.ERROR and await _is_gone(client):
                        raise _gone()
                    yield delta
                if reading.ended:
                    return
            if await _is_gone(client):
                raise _gone()
            raise SluiceError(ErrorKind.STREAM_INCOMPLETE, "vLLM's server ended the stream without a finish reason.")
        except grpc.aio.AioRpcError as error:
            cause = error_of(error)
            if cause.kind is ErrorKind.INTERNAL and await _is_gone(client):
                cause = _gone()
            raise naming_constraint(cause, request.guided) from error
        finally:
            if not reading.ended:
                call.cancel()
                self.tasks.spawn(self._abort_there(message.request_id), f"vllm-grpc-abort-{request.request_id}")

    async def _abort_there(self, request_id: str) -> None:
        """Says it once more by name: a cancelled call is not heard before its server looks up."""
        try:
            await self._started().abort([request_id])
        except SluiceError as error:
            log.info("vLLM's server did not take an abort", extra={"reason": error.message})

    async def cleanup(self) -> None:
        await self.tasks.close()
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        await self._server.stop()

    def load(self) -> Sequence[Load]:
        """As the server said last, and not less than what is under way from here."""
        if len(self._loads) > 1:
            return self._loads
        told = self._loads[0]
        ours = len(self._generate_tasks) - told.waiting_requests
        return [replace(told, running_requests=ours)] if ours > told.running_requests else self._loads

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        return self._sources

    async def clear_cache(self) -> None:
        await self._started().flush_cache()
        for source in self._sources:
            source.publish(source.translator.forget())

    async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
        client = self._started()
        if self._takes_generations():
            return await super().embed(inputs, dimensions, lora)
        if dimensions:
            raise invalid("vLLM's gRPC server does not cut embeddings; leave dimensions out.", param="dimensions")
        name = f"{self._prefix}embed-{time.monotonic_ns()}"
        return Embedded(await client.embed(name, inputs, EMBED_S), sum(len(token_ids) for token_ids in inputs))

    async def control(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        if action in ("start_profile", "stop_profile"):
            await self._started().profile(action == "start_profile")
            return {}
        return await super().control(action, arguments)

    def _takes_generations(self) -> bool:
        return self._config is not None and Capability.EMBEDDINGS not in self._config.capabilities

    def _started(self) -> Client:
        if self._client is None:
            raise SluiceError(ErrorKind.UNAVAILABLE, "The engine has not started yet.", code="engine_starting")
        return self._client

    async def _watch(self, client: Client) -> None:
        """Reads the load, and dies with the server or its engine."""
        failures = 0
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if not await client.healthy():
                    break
                self._note(wire.read_loads(await client.loads(), self._config.total_blocks if self._config else 0))
                failures = 0
            except SluiceError as error:
                # A server that is slow is the canary's business; one that cannot be reached is gone.
                failures += error.kind is ErrorKind.ENGINE_SHUTDOWN
                if failures >= FAILURES:
                    break
        raise _gone()

    def _note(self, loads: Sequence[Load]) -> None:
        held = [source.translator.held() for source in self._sources]
        self._loads = [
            replace(load, cached_blocks=held[rank]) if rank < len(held) else load for rank, load in enumerate(loads)
        ] or [Load()]


async def _is_gone(client: Client) -> bool:
    """Whether a request failed because the engine is dead: its server outlives it by a moment, says that all is
    well, and blames the request."""
    for _ in range(LOOKS):
        try:
            if not await client.healthy():
                return True
        except SluiceError:
            return True
        await asyncio.sleep(LOOK_AGAIN_S)
    return False


def _gone() -> SluiceError:
    return SluiceError(ErrorKind.ENGINE_SHUTDOWN, "vLLM's server is gone; another worker can serve the request.")
