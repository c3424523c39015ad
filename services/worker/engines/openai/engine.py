"""An engine that is an OpenAI-compatible HTTP server, which tokenizes prompts and parses output by itself."""

from __future__ import annotations

import logging
import time
from asyncio import sleep
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Self

from services.common.base.errors import ErrorKind, SluiceError, check_name, invalid, quoted, shortened
from services.common.packages.model_files import ModelSpec
from services.worker.contract.capabilities import Capability
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import EngineConfig, GenerateContext, LLMEngine, Load
from services.worker.contract.generation import Delta, GenerateRequest
from services.worker.engines.http.answers import reading
from services.worker.engines.http.client import HttpClient
from services.worker.engines.http.dialect import MAX_NUMBER
from services.worker.engines.inprocess.engine import starting
from services.worker.engines.openai.body import CAPABILITIES, ChunkReader, path_and_body
from services.worker.engines.openai.options import read_openai_options
from services.worker.engines.shared.server_watch import ServerWatch
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

MODELS = "/v1/models"
MAX_MODELS = 1_024
"""Models that an OpenAI server lists; with more the worker does not start."""
TRAILING_EVENTS = 16
"""Events read after the finish reason, among them the usage."""
START_INTERVAL_S = 0.5
POLL_INTERVAL_S = 2.0
PROBE_S = 10.0
"""Maximum seconds of a probe of an OpenAI server; half of the option silent_s if that is less."""
MAX_POLL_FAILURES = 3
"""Polls of an OpenAI server that may fail in a row; then the engine counts as ended."""


class OpenAiEngine(LLMEngine):
    """Sends each generation to the server as a chat completion or completion with a streamed response."""

    CAPABILITIES: ClassVar[frozenset[Capability]] = CAPABILITIES

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._options = read_openai_options(settings)
        self._client: HttpClient | None = None
        self._model = ""
        self._watch = ServerWatch(self._options.silent_s, POLL_INTERVAL_S, MAX_POLL_FAILURES, probe_s=PROBE_S)

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        self.on_phase("waiting for the engine's server", None)
        self._client = client = HttpClient(self._options.url, self._options.api_key_file)
        wanted = self._settings.spec if "model" in self._settings.model_fields_set else None
        card = _chosen(await self._list_models(client), wanted)
        self._model = str(card["id"])
        check_name(self._model, "The model's name on the server")
        limit = card.get("max_model_len")
        self.tasks.spawn(self._watch.run(lambda: client.get(MODELS), _no_report), "openai-engine-watch")
        return EngineConfig(
            model=self._model if wanted is None else wanted.name,
            source="",
            processor="",
            fingerprint="",
            context_length=limit if isinstance(limit, int) and 0 < limit <= MAX_NUMBER else 0,
            vocab_size=0,
            block_size=0,
            total_blocks=0,
            max_sequences=0,
            max_batched_tokens=0,
            eos_token_ids=(),
            capabilities=frozenset(CAPABILITIES),
            engine="openai",
            engine_version=shortened(str(card.get("owned_by") or "")),
            named_by_server=wanted is None,
            http_address=self._options.address,
        )

    async def _list_models(self, client: HttpClient) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self._options.start_s
        while True:
            try:
                with reading("list of models"):
                    return _models(await client.get_json(MODELS))
            except SluiceError as error:
                if time.monotonic() > deadline:
                    raise SluiceError(
                        ErrorKind.CANNOT_CONNECT,
                        f"The engine's server at {self._options.address} did not list its models: {error.message}",
                        param="engine_args",
                    ) from error
            await sleep(START_INTERVAL_S)

    async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        if self._client is None:
            raise starting()
        self._watch.check()
        path, body = path_and_body(request, self._model)
        stream = DeltaStream()
        reader = ChunkReader(stream)
        async with aclosing(self._client.events(path, body, context.trace)) as events:
            trailing = 0
            while (event := await self._watch.wait(anext(events, None))) is not None:
                reader.take(event)
                for delta in stream.take():
                    yield delta
                trailing += reader.finishing
                if trailing > TRAILING_EVENTS:
                    break  # the server does not end its stream
        reader.close()
        for delta in stream.take():
            yield delta

    async def cleanup(self) -> None:
        await self.tasks.close()
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def load(self) -> Sequence[Load]:
        """Returns the requests in flight from this worker; the API reports no load."""
        return [Load(running_requests=len(self._generate_tasks))]


async def _no_report() -> None:
    """Does nothing: the API reports no load."""


def _models(listed: Any) -> list[dict[str, Any]]:
    data = listed.get("data") if isinstance(listed, dict) else None
    if isinstance(data, list) and len(data) > MAX_MODELS:
        raise invalid(f"The server at the option url lists {len(data)} models; at most {MAX_MODELS} are supported.")
    if not isinstance(data, list) or not all(isinstance(one, dict) and one.get("id") for one in data):
        raise invalid("The server at the option url does not list models at /v1/models.", param="engine_args")
    return data


def _chosen(listed: list[dict[str, Any]], wanted: ModelSpec | None) -> dict[str, Any]:
    """Returns the model to serve: the one of --model NAME=ID, or else the server's only one."""
    names = ", ".join(quoted(str(one["id"])) for one in listed[:20]) or "none"
    if wanted is None:
        if len(listed) == 1:
            return listed[0]
        raise invalid(f"Set --model NAME=ID: the server lists {names}.", param="model")
    for one in listed:
        if one["id"] == wanted.source:
            return one
    raise invalid(f"The server does not list the model {quoted(wanted.source)}; it lists {names}.", param="model")
