"""The http engine: a client of one HTTP server of vLLM or SGLang that runs elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, ClassVar, Self

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.worker.contract.cache_events import KvEventSource
from services.worker.contract.capabilities import Capability
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import EngineConfig, GenerateContext, LLMEngine, Load
from services.worker.contract.generation import Delta, GenerateRequest, StopParams
from services.worker.engines.http import card, sglang, vllm
from services.worker.engines.http.answers import reading
from services.worker.engines.http.client import HttpClient, RequestFailedError
from services.worker.engines.http.dialect import Description, Dialect
from services.worker.engines.http.events import RemoteEvents, chosen_publishers
from services.worker.engines.http.options import read_http_options
from services.worker.engines.inprocess.engine import starting
from services.worker.engines.shared.grammar_compiler import naming_constraint, refused_constraint
from services.worker.engines.shared.server_watch import ServerWatch
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

START_INTERVAL_S = 0.5
POLL_INTERVAL_S = 1.0
MAX_POLL_FAILURES = 3
"""Polls of an engine's server that may fail in a row; then the engine counts as ended."""
TRAILING_EVENTS, TRAILING_S = 16, 1.0
"""What is read after the end of a generation; a connection on which more follows is closed."""
MIN_VOCABULARY = 256
"""Ids that every vocabulary of unknown size is assumed to have."""


class HttpEngine(LLMEngine):
    """Sends each generation to the server as a separate HTTP request with a streamed response."""

    CAPABILITIES: ClassVar[frozenset[Capability]] = vllm.CAPABILITIES | sglang.CAPABILITIES

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._options = read_http_options(settings)
        self._client: HttpClient | None = None
        self._dialect: Dialect | None = None
        self._events: RemoteEvents | None = None
        self._loads: Sequence[Load] = [Load()]
        self._engine_block = self._block = 1
        self._watch = ServerWatch(self._options.silent_s, POLL_INTERVAL_S, MAX_POLL_FAILURES)

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        self.on_phase("waiting for the engine's server", None)
        self._client = client = HttpClient(self._options.url, self._options.api_key_file)
        await self._wait_healthy(client)
        self._dialect = dialect = await find_dialect(client)
        described = await self.describe(client, dialect)
        self.on_phase("reading the model's files", None)
        settings = card.with_model(self._settings, described)
        path = await asyncio.to_thread(card.tokenizer_folder, settings)
        vocabulary = await asyncio.to_thread(card.vocab_size, path) or MIN_VOCABULARY
        size = card.block_size(settings, described.block_size)
        self._engine_block, self._block = described.block_size or 1, size or 1
        self.on_phase("proving the engine's KV events", None)
        config = await asyncio.to_thread(
            card.engine_config,
            settings,
            path,
            described,
            dialect.NAME,
            has_events=await self._follow_events(described, size, vocabulary),
            address=self._options.address,
        )
        config = replace(config, named_by_server="model" not in self._settings.model_fields_set)
        self._loads = [Load() for _ in range(config.data_parallel_size)]
        watch = self._watch.run(lambda: client.get(dialect.ALIVE), lambda: self.poll_load(client, dialect))
        self.tasks.spawn(watch, "http-engine-watch")
        return config

    async def describe(self, client: HttpClient, dialect: Dialect) -> Description:
        """Returns what the server reports about itself; raises SluiceError when that is malformed or insufficient."""
        with reading("description of itself"):
            return await dialect.describe(client)

    async def _wait_healthy(self, client: HttpClient) -> None:
        deadline = time.monotonic() + self._options.start_s
        while True:
            try:
                await client.get("/health")
                return
            except SluiceError as error:
                if time.monotonic() > deadline:
                    raise SluiceError(
                        ErrorKind.CANNOT_CONNECT,
                        f"The engine's server at {self._options.address} did not become healthy: {error.message}",
                        param="engine_args",
                    ) from error
            await asyncio.sleep(START_INTERVAL_S)

    async def _follow_events(self, described: Description, block_size: int, vocab_size: int) -> bool:
        """Subscribes to the KV events of every rank; returns whether they are proven, and logs why not."""
        publishers, problem = chosen_publishers(self._options, described.publishers, described.ranks)
        if not problem and Capability.KV_EVENTS not in described.capabilities:
            problem = "The server caches no prefixes."
        if not problem and not block_size:
            problem = "The server does not report its block size; set --block-size."
        if not problem:
            counts_copies = self._require_dialect().COUNTS_COPIES
            events = RemoteEvents(lambda name, error: self.on_failure(name, error), counts_copies=counts_copies)
            problem = await events.follow(publishers, block_size, self._probe, vocab_size)
            self._events = None if problem else events
        if problem:
            log.warning("this worker runs without KV events, so routing predicts its cache: %s", problem)
        return not problem

    async def _probe(self, rank: int, prompt: array[int]) -> None:
        """Computes a prompt on one rank."""
        request = GenerateRequest(
            uuid.uuid4().hex,
            "",
            prompt,
            stop=StopParams(max_tokens=1, ignore_eos=True),
            data_parallel_rank=rank or None,
        )
        async with aclosing(self.generate(request, GenerateContext(request.request_id))) as deltas:
            async for _ in deltas:
                pass

    async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        client, dialect = self._require_client(), self._require_dialect()
        self._watch.check()
        # SGLang aborts by prefix of the id, and other workers may use the same server.
        request_id = uuid.uuid4().hex
        call = dialect.call(request, request_id)
        stream = DeltaStream()
        reader = dialect.reader(request, stream)
        has_begun = False
        try:
            async with aclosing(client.events(call.path, call.body, {**context.trace, **call.headers})) as events:
                while (event := await self._watch.wait(_next_event(events, reader.finishing))) is not None:
                    with reading("chunk"):
                        reader.take(event)
                    if reader.ended:
                        await _read_to_end(events)
                        break
                    if reader.finishing:
                        continue  # with an end-of-sequence token the caller stops reading: it gets it with the usage
                    for delta in stream.take():
                        has_begun = True
                        yield delta
            if not reader.ended:
                reader.close()
            for delta in stream.take():
                yield delta
        except SluiceError as error:
            if isinstance(error, RequestFailedError) and request.guided is not None and not has_begun:
                survived = await self._watch.survived(lambda: client.get(dialect.ALIVE))
                error = refused_constraint() if survived else error
            raise naming_constraint(error, request.guided) from error
        finally:
            if not reader.ended:
                self.tasks.spawn(self._abort_on_server(request_id), f"http-engine-abort-{request_id}")

    async def _abort_on_server(self, request_id: str) -> None:
        try:
            await self._require_dialect().abort(self._require_client(), request_id)
        except SluiceError as error:
            log.info("the engine's server failed to abort a request", extra={"reason": error.message})

    async def cleanup(self) -> None:
        await self.tasks.close()
        if self._events is not None:
            await self._events.stop()
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def load(self) -> Sequence[Load]:
        """Returns the server's last reported load, with at least the requests in flight from this worker."""
        if len(self._loads) > 1:
            return self._loads
        load = self._loads[0]
        running = len(self._generate_tasks) - load.waiting_requests
        return [replace(load, running_requests=running)] if running > load.running_requests else self._loads

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        return () if self._events is None else self._events.sources

    async def clear_cache(self) -> None:
        await self._require_dialect().clear_cache(self._require_client())
        if self._events is not None:
            self._events.forget()

    def _require_client(self) -> HttpClient:
        if self._client is None:
            raise starting()
        return self._client

    def _require_dialect(self) -> Dialect:
        if self._dialect is None:
            raise starting()
        return self._dialect

    async def poll_load(self, client: HttpClient, dialect: Dialect) -> None:
        """Updates the load as the server reports it; raises SluiceError when the report is malformed."""
        with reading("load"):
            self._update_loads(await dialect.loads(client))

    def _update_loads(self, reported: Sequence[Load]) -> None:
        loads = reported if len(reported) == len(self._loads) else [Load()] * len(self._loads)
        events = self._events
        self._loads = [
            replace(
                load,
                used_blocks=load.used_blocks * self._engine_block // self._block,
                cached_blocks=0 if events is None else events.cached_blocks(rank),
            )
            for rank, load in enumerate(loads)
        ]


async def _next_event(
    events: AsyncGenerator[Mapping[str, Any], None], only_usage_is_missing: bool
) -> Mapping[str, Any] | None:
    """Returns the next event; None at the end, or when the usage of a finished generation does not follow in time."""
    if not only_usage_is_missing:
        return await anext(events, None)
    try:
        async with asyncio.timeout(TRAILING_S):
            return await anext(events, None)
    except (TimeoutError, SluiceError) as error:
        log.info("the engine's server finished a generation without usage", extra={"reason": type(error).__name__})
        return None


async def _read_to_end(events: AsyncGenerator[Mapping[str, Any], None]) -> None:
    """Reads what little follows the end of a generation, so that the connection can be used again."""
    with suppress(TimeoutError, SluiceError):
        async with asyncio.timeout(TRAILING_S):
            for _ in range(TRAILING_EVENTS):
                if await anext(events, None) is None:
                    return


async def find_dialect(client: HttpClient) -> Dialect:
    """Returns the dialect of a server; raises SluiceError(INVALID_ARGUMENT) when it is neither vLLM nor SGLang."""
    for path, dialect in (
        ("/version", vllm.VllmDialect),
        ("/model_info", sglang.SglangDialect),
        ("/get_model_info", sglang.SglangDialect),
    ):
        try:
            found = await client.get_json(path)
        except SluiceError as error:
            if error.kind is not ErrorKind.NOT_FOUND:
                raise
        else:
            if isinstance(found, dict) and ("version" in found or "model_path" in found):
                return dialect()
    raise invalid(
        "The server at the option url is neither vLLM nor SGLang; if it has an OpenAI-compatible API, use --engine "
        "openai, or api: openai in the file of engines.",
        param="engine_args",
    )
