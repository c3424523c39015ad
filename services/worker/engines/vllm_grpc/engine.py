"""The vllm-grpc engine: a client of one `vllm serve --grpc`, which it starts unless configured with an address."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import grpc

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.net.ports import free_port
from services.common.packages import model_files as models
from services.worker.contract.cache_events import KvEventSource
from services.worker.contract.capabilities import Capability
from services.worker.contract.engine import Embedded, EngineConfig, GenerateContext, LLMEngine, Load
from services.worker.contract.generation import Delta, FinishReason, GenerateRequest, Role, StopParams
from services.worker.engines.inprocess import card as inprocess_card
from services.worker.engines.inprocess.engine import embed_each, embeddings_only, starting
from services.worker.engines.inprocess.event_proof import EventProof
from services.worker.engines.inprocess.sampling import Facts
from services.worker.engines.shared import crash_reason
from services.worker.engines.shared.grammar_compiler import naming_constraint, refused_constraint
from services.worker.engines.shared.media_prompts import placeholder_of
from services.worker.engines.shared.server_watch import ServerWatch, server_exited
from services.worker.engines.vllm.handoff import read_handoff
from services.worker.engines.vllm.options import kv_events_config
from services.worker.engines.vllm_grpc import card, media, tokenizer, wire
from services.worker.engines.vllm_grpc.client import Client, error_of
from services.worker.engines.vllm_grpc.feed import GrpcFeed
from services.worker.engines.vllm_grpc.options import LOOPBACK, read_server_options, serve_command
from services.worker.engines.vllm_grpc.response_reader import ResponseReader
from services.worker.engines.vllm_grpc.server import Server, find_program
from services.worker.kv_events.source import EngineCacheSource
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
SUBSCRIBE_TIMEOUT_S = 10.0
EMBED_TIMEOUT_S = 120.0
IMAGE_PROBE_TIMEOUT_S = 60.0
MAX_POLL_FAILURES = 2
"""Polls in a row that may find vLLM's server unreachable; then the engine counts as ended."""


class VllmGrpcEngine(LLMEngine):
    """Sends each generation to the server as a separate gRPC stream."""

    CAPABILITIES: ClassVar[frozenset[Capability]] = card.CAPABILITIES

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._options = read_server_options(settings, settings.spec.source)
        self._server = Server()
        self._watch = ServerWatch(
            self._options.silent_s,
            POLL_INTERVAL_S,
            MAX_POLL_FAILURES,
            fails=lambda error: error.kind is ErrorKind.ENGINE_SHUTDOWN,  # the canary handles a slow server
        )
        self._client: Client | None = None
        self._config: EngineConfig | None = None
        self._facts = Facts(0)
        self._prefix = ""
        self._placeholder: int | None = None
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
        await self._wait_healthy(client)
        model, server, loads = await client.model_info(), await client.server_info(), await client.loads()
        card.check_answers(model, server)
        self._check_role(server)
        named_by_server = bool(self._options.address) and "model" not in self._settings.model_fields_set
        if self._options.address:
            self._settings = card.with_model(self._settings, model)
        size = self._block_size(server)
        self._facts = card.request_facts(model)
        self.on_phase("reading the model's files", None)
        path, source = await self._tokenizer_files(client)
        self._placeholder = await self._find_placeholder(client, path, server)
        flags = {
            "takes_images": self._placeholder is not None,
            "has_events": bool(model.is_generation) and await self._follow_events(client, model, server, size),
            "profiles": self._options.profiles,
        }
        self._config = await asyncio.to_thread(
            card.engine_config, self._settings, path, source, size, model, server, loads, **flags
        )
        self._config = replace(self._config, named_by_server=named_by_server)
        self._loads = [Load() for _ in range(self._config.data_parallel_size)]
        self.tasks.spawn(self._watch.run(client.healthy, partial(self._poll_load, client)), "vllm-grpc-watch")
        return self._config

    async def _start_server(self) -> str:
        self.on_phase("starting vLLM's server", None)
        folder = await asyncio.to_thread(self._server.make_folder)
        port = free_port()  # vLLM cannot choose a free port and report it
        command = serve_command(
            find_program(self._options.program), self._options.flags, port, kv_events_config(folder, 1)
        )
        await self._server.start(command)
        return f"{LOOPBACK}:{port}"

    async def _wait_healthy(self, client: Client) -> None:
        deadline = time.monotonic() + self._options.start_s
        exited = None if self._options.address else asyncio.ensure_future(self._server.wait())
        try:
            while True:
                try:
                    if await client.healthy():
                        return
                except SluiceError as error:
                    if error.kind is ErrorKind.FAILED_PRECONDITION:
                        raise
                if exited is not None and exited.done():
                    missing = crash_reason.missing_from(self._settings.spec.source)
                    raise invalid(
                        missing or f"vLLM's server exited with status {exited.result()} during its start; see its log.",
                        param="model" if missing else "engine_args",
                    )
                if time.monotonic() > deadline:
                    raise SluiceError(
                        ErrorKind.CANNOT_CONNECT,
                        "vLLM's server did not become ready; see its log.",
                        param="engine_args",
                    )
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            if exited is not None:
                exited.cancel()

    def _check_role(self, server: Any) -> None:
        if self._settings.role != "aggregated" and not server.kv_connector:
            raise invalid(
                f"vLLM's server has no KV connector for the role {self._settings.role}; start it with "
                "--kv-transfer-config.",
                param="role",
            )

    async def _tokenizer_files(self, client: Client) -> tuple[Path, str]:
        """Returns the folder of the tokenizer's files and their source on the card; fetches missing files."""
        source = self._settings.spec.source
        try:
            return await asyncio.to_thread(models.resolve, source), source
        except SluiceError as error:
            if error.kind is not ErrorKind.NOT_FOUND or not self._options.address:
                raise
        folder = Path(await asyncio.to_thread(self._server.make_folder))
        return await tokenizer.fetch_into(client, folder), str(folder)

    def _block_size(self, server: Any) -> int:
        """Returns the tokens per Sluice block: for a running server --block-size if set, otherwise the server's."""
        engine_size = int(server.block_size)
        declared = inprocess_card.declared_block_size(self._settings, engine_size) if self._options.address else 0
        return declared or engine_size

    async def _follow_events(self, client: Client, model: Any, server: Any, block_size: int) -> bool:
        """Subscribes to the KV events of every rank; returns whether the server publishes them."""
        if not server.block_size:
            return False
        ranks = range(max(int(server.data_parallel_size), 1))
        self._sources = tuple(
            EngineCacheSource(rank, block_size, counts_copies=True, can_replay=False) for rank in ranks
        )
        opened = asyncio.Event()
        feed = GrpcFeed(client, self._sources, opened.set)
        feed_task = self.tasks.spawn(feed.run(), "vllm-grpc-kv-events")
        try:
            async with asyncio.timeout(SUBSCRIBE_TIMEOUT_S):
                await opened.wait()
        except TimeoutError:
            feed_task.cancel()
            self._sources = ()
            log.warning("vLLM's server publishes no KV events; start it with --kv-events-config")
            return False
        if problem := await self._prove_events(client, feed_task, block_size, int(model.vocab_size)):
            feed_task.cancel()
            self._sources = ()
            log.warning("this worker runs without KV events, so routing predicts its cache: %s", problem)
        return not problem

    async def _prove_events(
        self, client: Client, feed_task: asyncio.Task[None], block_size: int, vocab_size: int
    ) -> str:
        """Returns why the events of a server that runs elsewhere cannot be used; empty if they can."""
        if not self._options.address:
            return ""  # started here, with a configuration that is known to work

        def failure() -> BaseException | None:
            return feed_task.exception() if feed_task.done() and not feed_task.cancelled() else None

        for source in self._sources:
            proof = EventProof(source, self._options.address, block_size, vocab_size)
            if problem := await proof.run(partial(self._probe, client, source.rank), failure):
                return problem
        return ""

    async def _find_placeholder(self, client: Client, path: Path, server: Any) -> int | None:
        """Returns the placeholder token of images; None if the server does not process images."""
        if not media.is_offered(server):
            return None
        placeholder = placeholder_of(await asyncio.to_thread(media.model_config, path))
        if placeholder is None:
            return None
        request = media.probe(placeholder)
        try:
            async with asyncio.timeout(IMAGE_PROBE_TIMEOUT_S):
                expanded = await self._compute(client, request, placeholder)
        except (SluiceError, TimeoutError) as error:
            log.warning("vLLM's server rejects images, so this worker takes none: %s", error)
            return None
        if expanded <= len(request.token_ids):
            log.warning("vLLM's server ignores images, so this worker takes none")
            return None
        return placeholder

    async def _probe(self, client: Client, rank: int, prompt: array[int]) -> None:
        """Computes a prompt on one rank."""
        await self._compute(client, GenerateRequest("", "", prompt, data_parallel_rank=rank or None))

    async def _compute(self, client: Client, request: GenerateRequest, placeholder: int | None = None) -> int:
        """Computes a prompt and one token; returns the number of tokens in the expanded prompt."""
        stop = StopParams(max_tokens=1, ignore_eos=True)
        message = wire.write_request(replace(request, stop=stop), self._facts, None, placeholder)
        message.request_id = self._prefix + uuid.uuid4().hex
        call = client.generate(message)
        expanded = 0
        try:
            async for response in call:
                expanded = max(expanded, response.chunk.prompt_tokens, response.complete.prompt_tokens)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()
        return expanded

    async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        client = self._require_client()
        if not self._is_generation():
            raise embeddings_only()
        self._watch.check()
        disaggregation = request.disaggregation
        handoff = None
        if disaggregation is not None and disaggregation.role is Role.DECODE and disaggregation.handoff:
            handoff = read_handoff(disaggregation.handoff)
        message = wire.write_request(request, self._facts, handoff, self._placeholder)
        message.request_id = self._prefix + request.request_id
        reader = ResponseReader(request)
        call = client.generate(message)
        try:
            responses = aiter(call)
            while (response := await self._watch.wait(anext(responses, None))) is not None:
                if (delta := reader.take(response)) is not None:
                    if delta.finish_reason is FinishReason.ERROR:
                        if not await self._watch.survived(client.healthy):
                            raise server_exited()
                        if reader.may_refuse_constraint:
                            raise naming_constraint(refused_constraint(), request.guided)
                    yield delta
                if reader.ended:
                    return
            if not await self._watch.survived(client.healthy):
                raise server_exited()
            raise SluiceError(ErrorKind.STREAM_INCOMPLETE, "vLLM's server ended the stream without a finish reason.")
        except grpc.aio.AioRpcError as error:
            cause = error_of(error)
            if cause.kind is ErrorKind.INTERNAL and not await self._watch.survived(client.healthy):
                cause = server_exited()
            elif cause.kind is ErrorKind.INTERNAL and reader.may_refuse_constraint:
                cause = refused_constraint()
            raise naming_constraint(cause, request.guided) from error
        finally:
            if not reader.ended:
                call.cancel()
                self.tasks.spawn(self._abort_on_server(message.request_id), f"vllm-grpc-abort-{request.request_id}")

    async def _abort_on_server(self, request_id: str) -> None:
        """Aborts a request by id, because the server detects a cancelled call only with a delay."""
        try:
            await self._require_client().abort([request_id])
        except SluiceError as error:
            log.info("vLLM's server failed to abort a request", extra={"reason": error.message})

    async def cleanup(self) -> None:
        await self.tasks.close()
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        await self._server.stop()

    def load(self) -> Sequence[Load]:
        """Returns the server's last reported load, with at least the requests in flight from this worker."""
        if len(self._loads) > 1:
            return self._loads
        load = self._loads[0]
        running = len(self._generate_tasks) - load.waiting_requests
        return [replace(load, running_requests=running)] if running > load.running_requests else self._loads

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        return self._sources

    async def clear_cache(self) -> None:
        await self._require_client().flush_cache()
        for source in self._sources:
            source.publish(source.translator.forget())

    async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
        client = self._require_client()
        if self._is_generation():
            return await super().embed(inputs, dimensions, lora)
        if dimensions:
            raise invalid("vLLM's gRPC server cannot truncate embeddings; omit dimensions.", param="dimensions")
        name = f"{self._prefix}embed-{time.monotonic_ns()}"
        self._watch.check()

        async def embed(index: int) -> bytes:
            return await self._watch.wait(client.embed(f"{name}-{index}", inputs[index], EMBED_TIMEOUT_S))

        return await embed_each(inputs, embed)

    async def control(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        if action in ("start_profile", "stop_profile"):
            await self._require_client().profile(action == "start_profile")
            return {}
        return await super().control(action, arguments)

    def _is_generation(self) -> bool:
        return self._config is not None and Capability.EMBEDDINGS not in self._config.capabilities

    def _require_client(self) -> Client:
        if self._client is None:
            raise starting()
        return self._client

    async def _poll_load(self, client: Client) -> None:
        self._update_loads(wire.read_loads(await client.loads(), self._config.total_blocks if self._config else 0))

    def _update_loads(self, loads: Sequence[Load]) -> None:
        cached = [source.translator.held() for source in self._sources]
        self._loads = [
            replace(load, cached_blocks=cached[rank]) if rank < len(cached) else load for rank, load in enumerate(loads)
        ] or [Load()]
