"""The vLLM engine: starts AsyncLLM, submits requests to it and monitors its process."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from services.common.base.errors import invalid
from services.common.packages import model_files as models
from services.common.types.media.spans import MediaKind
from services.worker.contract.cache_events import KvEventSource
from services.worker.contract.capabilities import Capability
from services.worker.contract.engine import Embedded, EngineConfig, GenerateContext, Load, Sink
from services.worker.contract.generation import FinishReason, GenerateRequest, Role
from services.worker.engines.inprocess.engine import InProcessEngine, embed_each, embeddings_only, starting
from services.worker.engines.inprocess.sampling import Facts
from services.worker.engines.shared.download import download
from services.worker.engines.shared.grammar_compiler import GrammarCompiler
from services.worker.engines.vllm import card, library, options
from services.worker.engines.vllm.adapters import Adapters
from services.worker.engines.vllm.controls import Controls
from services.worker.engines.vllm.events import CacheEvents
from services.worker.engines.vllm.handoff import Handoff, read_handoff
from services.worker.engines.vllm.inflight_requests import InflightRequests
from services.worker.engines.vllm.media import MediaPrompts
from services.worker.engines.vllm.outputs import RequestState
from services.worker.engines.vllm.sampling import sampling_arguments
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

HEALTH_CHECK_INTERVAL_S = 0.25
SHUTDOWN_TIMEOUT_S = 3.0


class VllmEngine(InProcessEngine):
    """Hosts vLLM's AsyncLLM: the scheduler and the model run in child processes, their client in the worker."""

    CAPABILITIES: ClassVar[frozenset[Capability]] = card.CAPABILITIES

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._startup_adapters = options.named_adapters(settings.adapters)
        self._llm: Any = None
        self._config: Any = None
        self._facts = Facts(0)
        self._loads: list[Load] = [Load()]
        self._media: MediaPrompts | None = None
        self._adapters = Adapters()
        self._controls: Controls | None = None
        self._events = CacheEvents()
        self._grammars = GrammarCompiler()
        self._states = InflightRequests(self.tasks, self._abort_in_vllm, library.error_of)

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        options.command_line(settings, settings.spec.source)
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        settings = self._settings
        self.on_phase("importing vLLM", None)
        version = await asyncio.to_thread(library.prepare, settings.log_level)
        await download(settings.spec.source, self.on_phase)
        self.on_phase("reading the model's files", None)
        path = await asyncio.to_thread(models.resolve, settings.spec.source)
        arguments = await asyncio.to_thread(self._arguments, path)
        self.on_phase("loading the model into vLLM", None)
        self._llm = await asyncio.to_thread(library.launch, arguments, self._record_stats)
        self._config = config = self._llm.vllm_config
        self._check_role()
        self._media = await asyncio.to_thread(MediaPrompts, self._llm)
        await self._media.start()
        self._facts = card.request_facts(config)
        self._loads = [Load() for _ in range(config.parallel_config.data_parallel_size)]
        self._controls = Controls(self._llm, self._adapters, self._events, has_connector=_has_connector(config))
        self.on_phase("loading adapters", None)
        for name, folder in self._startup_adapters.items():
            await self._controls.load_lora({"name": name, "path": folder})
        publishing = config.kv_events_config
        if publishing is not None and publishing.enable_kv_cache_events:
            self._events.open(
                publishing.endpoint, self._llm.get_kv_event_sources(), int(config.cache_config.block_size), self.tasks
            )
        self.tasks.spawn(self._monitor_process(), "vllm-watch")
        if config.model_config.runner_type != "pooling":
            self.on_phase("warming up", None)
            await self.warm_up_logprobs()
        return await asyncio.to_thread(self._describe, path, version)

    def _arguments(self, path: Path) -> Any:
        """Returns vLLM's engine arguments, with the worker's defaults for options that the user did not set."""
        source = self._settings.spec.source
        # For a hub id only the tokenizer files are local; vLLM downloads the weights itself.
        argv = options.command_line(self._settings, str(path) if Path(source).expanduser().exists() else source)
        argv = library.add_defaults(argv, {"scheduling_policy": "priority"})
        arguments = library.read_arguments(argv)
        caches = arguments.enable_prefix_caching is not False and arguments.runner != "pooling"
        if arguments.kv_events_config is None and caches:
            endpoints = self._events.endpoints(arguments.data_parallel_size)
            arguments = library.read_arguments(library.add_defaults(argv, {"kv_events_config": endpoints}))
        return arguments

    def _describe(self, path: Path, version: str) -> EngineConfig:
        return card.engine_config(
            self._settings,
            path,
            self._config,
            version,
            self._adapters.names,
            has_events=bool(self._events.sources),
            media=self._media_kinds(),
        )

    def _media_kinds(self) -> frozenset[MediaKind]:
        return frozenset() if self._media is None else self._media.kinds

    def _check_role(self) -> None:
        role = self._settings.role
        if role != "aggregated" and not _has_connector(self._config):
            raise invalid(
                f"vLLM needs a KV connector for the role {role}; add --kv-transfer-config after --.", param="role"
            )

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        llm = self._require_llm()
        if self._config.model_config.runner_type == "pooling":
            raise embeddings_only()
        handoff = _handoff_of(request)
        params = library.sampling_params(sampling_arguments(request, self._facts, handoff))
        if handoff is not None and request.media:
            raise invalid("vLLM takes no media items as a decode worker; use an aggregated worker.", param="media")
        prompt = None if request.media else self._prompt(request, handoff)
        adapter = self._lora(request.lora)
        state = RequestState(
            request.embeds.length if request.embeds is not None else len(request.token_ids),
            sink,
            request.logprobs,
            request.prompt_logprobs,
            is_prefill=_has_role(request, Role.PREFILL),
            guided=request.guided if handoff is None else None,  # a pair's prefill worker has compiled it
        )
        if handoff is not None and handoff.token_id in request.stop.stop_token_ids:
            raise invalid(
                "The token of the prefill worker already ends this request; do not send it to a decode worker.",
                param="disaggregation",
            )
        options = {
            "lora_request": adapter,
            "priority": request.priority,
            "data_parallel_rank": request.data_parallel_rank,
        }
        add = llm.add_request if request.guided is None else self._add_guided
        if request.media:
            self._states.begin(request.request_id, state, lambda: self._add_media(add, request, params, options))
        else:
            self._states.begin(request.request_id, state, lambda: add(request.request_id, prompt, params, **options))

    async def _add_media(self, add: Callable[..., Any], request: GenerateRequest, params: Any, options: Any) -> Any:
        """Adds a request with media items after decoding and processing them off the event loop."""
        if self._media is None:
            raise starting()
        prompt = await self._media.prompt(request.token_ids, request.media, request.cache_salt, request.resumed_tokens)
        return await add(request.request_id, prompt, params, **options)

    async def _add_guided(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        """Adds a request after compiling its grammar in a thread; AsyncLLM.add_request would block the event loop."""
        llm = self._require_llm()
        tasks = await llm.get_supported_tasks()
        prompt = await self._grammars.run(lambda: library.checked(llm, request_id, prompt, params, tasks, options))
        return await llm.add_request(request_id, prompt, params, **options)

    def _prompt(self, request: GenerateRequest, handoff: Handoff | None) -> Any:
        if request.embeds is not None:
            return library.embeds_of(request.embeds, request.cache_salt, self._config.model_config)
        token_ids = request.token_ids if handoff is None else [*request.token_ids, handoff.token_id]
        return library.prompt_of(token_ids, request.cache_salt)

    def _lora(self, name: str) -> Any:
        if not name:
            return None
        adapter = self._adapters.find(name)
        return library.lora_request(adapter.engine_name, adapter.number, adapter.path)

    def abort(self, context: GenerateContext) -> None:
        context.cancelled = True
        self._states.cancel(context.request_id)

    async def drain(self) -> None:
        await self._states.wait_idle()

    async def cleanup(self) -> None:
        self._states.end_all(FinishReason.CANCELLED)
        self._grammars.close()
        await self.tasks.close()
        llm, self._llm, media, self._media = self._llm, None, self._media, None
        if media is not None:
            await media.close()
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_TIMEOUT_S)
        self._events.close()

    def load(self) -> Sequence[Load]:
        waiting = self._states.waiting_tokens // len(self._loads)
        return [
            Load(
                running_requests=load.running_requests,
                waiting_requests=load.waiting_requests,
                used_blocks=load.used_blocks,
                cached_blocks=self._events.cached_blocks(rank),
                prefill_tokens=waiting,
            )
            for rank, load in enumerate(self._loads)
        ]

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        return self._events.sources

    async def clear_cache(self) -> None:
        await self._require_controls().clear_cache()

    async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
        llm = self._require_llm()
        if self._config.model_config.runner_type != "pooling":
            return await super().embed(inputs, dimensions, lora)
        adapter = self._lora(lora)
        return await embed_each(inputs, lambda index: library.embed(llm, inputs[index], dimensions, adapter))

    async def classify(self, inputs: Sequence[array[int]], second_text_at: Sequence[int], lora: str = "") -> Embedded:
        llm, labels = self._require_llm(), card.labels(self._config)
        if self._config.model_config.runner_type != "pooling" or not labels:
            return await super().classify(inputs, second_text_at, lora)
        adapter = self._lora(lora)
        if not card.has_segments(self._config):  # vLLM's process ends when its model does not take them
            second_text_at = [0] * len(inputs)
        return await embed_each(
            inputs, lambda index: library.classify(llm, inputs[index], second_text_at[index], adapter)
        )

    async def control(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        available = await asyncio.to_thread(
            card.capabilities, self._config, has_events=bool(self._events.sources), media=self._media_kinds()
        )
        return await self._require_controls().run(action, arguments, available)

    def metrics_text(self) -> str:
        return "" if self._llm is None else library.metrics_text()

    def _require_llm(self) -> Any:
        if self._llm is None:
            raise starting()
        return self._llm

    def _require_controls(self) -> Controls:
        if self._controls is None:
            raise starting()
        return self._controls

    async def _abort_in_vllm(self, engine_ids: list[str]) -> None:
        if self._llm is not None:
            await self._llm.abort(engine_ids, internal=True)

    def _record_stats(self, rank: int, stats: Any) -> None:
        """Updates a rank's load; called by vLLM's output loop after each step."""
        if rank < len(self._loads):
            self._loads[rank] = Load(
                running_requests=stats.num_running_reqs,
                waiting_requests=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
                used_blocks=round(stats.kv_cache_usage * card.usable_blocks(self._config or self._llm.vllm_config)),
            )

    async def _monitor_process(self) -> None:
        """Raises, and ends every request in flight with an error, when the engine process exits."""
        llm = self._llm
        while not llm.errored:  # noqa: ASYNC110
            await asyncio.sleep(HEALTH_CHECK_INTERVAL_S)
        error = library.engine_exited()
        self._states.end_all(FinishReason.ERROR, error)
        raise error


def _has_role(request: GenerateRequest, role: Role) -> bool:
    return request.disaggregation is not None and request.disaggregation.role is role


def _handoff_of(request: GenerateRequest) -> Handoff | None:
    disaggregation = request.disaggregation
    if disaggregation is None or disaggregation.role is not Role.DECODE or not disaggregation.handoff:
        return None
    return read_handoff(disaggregation.handoff)


def _has_connector(config: Any) -> bool:
    return config.kv_transfer_config is not None
