"""The mock engine: a scheduler per data-parallel rank, and the state they share."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from typing import Self

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.worker.contract.cache_events import KvEventSource
from services.worker.contract.engine import Embedded, EngineConfig, GenerateContext, Load, Sink
from services.worker.contract.generation import FinishReason, GenerateRequest, Role
from services.worker.engines.inprocess.engine import InProcessEngine, starting
from services.worker.engines.mock import options
from services.worker.engines.mock.blocks import BlockPool
from services.worker.engines.mock.capabilities import ACCEPTED, CAPABILITIES, capabilities_of
from services.worker.engines.mock.faults import Faults, injected
from services.worker.engines.mock.loading import Loaded, load, timing
from services.worker.engines.mock.operations import Operations
from services.worker.engines.mock.outputs import classify, embed
from services.worker.engines.mock.rank import Rank, Statistics
from services.worker.engines.mock.scheduler import MockScheduler
from services.worker.engines.mock.sequence import Sequence as Running
from services.worker.engines.mock.text import Answer
from services.worker.engines.mock.transfer import accept, transfer_of
from services.worker.engines.shared.download import download
from services.worker.settings import WorkerSettings

DEFAULT_CONTEXT_LENGTH = 131_072
VERSION = "3"
EMBEDDING_WIDTH = 256
"""Dimensions of an embedding."""
KV_TOKEN_BYTES = 131_072
"""Bytes of KV cache per token."""
TRANSFER_GBPS = 100.0
"""Rate of KV-cache transfers to a decode worker, gigabits per second."""


class MockEngine(InProcessEngine):
    """Simulates an engine on a GPU, in real time or faster, with output in the vocabulary of the model's tokenizer.

    Output is determined by the prompt and the seed. The supported sampling options are listed in `capabilities`.
    """

    CAPABILITIES = CAPABILITIES
    ACCEPTED = ACCEPTED

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._role = Role[settings.role.upper()]
        self._options = options.read(settings.engine_args)
        self._timing = timing(self._options, settings.speedup)
        self._operations = Operations(
            tuple(settings.adapters),
            Faults().with_all(self._options.fault),
            self._wake_ranks,
            self._clear_ranks,
        )
        self._sources = [KvEventSource(rank) for rank in range(self._options.data_parallel_size)]
        self._ranks: list[Rank] = []
        self._arrivals = 0
        self._loaded: Loaded | None = None
        self._context_length = self._vocab_size = 0
        self._statistics = Statistics()

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        if settings.engine_flags:
            raise invalid("The mock engine accepts no options after --; use --engine-args.", param="engine_args")
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        settings, ranks, labels = self._settings, self._options.data_parallel_size, self._options.labels
        await download(settings.spec.source, self.on_phase, weights=False)
        self.on_phase("loading the tokenizer", None)
        self._loaded = loaded = await asyncio.to_thread(load, settings, ranks)
        self._vocab_size = loaded.vocabulary.size
        # A sequence cannot be longer than the whole cache.
        self._context_length = min(
            settings.context_length or loaded.context_length or DEFAULT_CONTEXT_LENGTH,
            settings.total_blocks * settings.block_size,
        )
        for number, source in enumerate(self._sources):
            rank = self._make_rank(source)
            self._ranks.append(rank)
            self.tasks.spawn(rank.run(), f"mock-engine-steps-{number}")
        return EngineConfig(
            model=settings.spec.name,
            source=settings.spec.source,
            processor=loaded.processor,
            fingerprint=loaded.fingerprint,
            context_length=self._context_length,
            vocab_size=self._vocab_size,
            block_size=settings.block_size,
            total_blocks=settings.total_blocks,
            max_sequences=settings.max_sequences,
            max_batched_tokens=settings.max_batched_tokens,
            eos_token_ids=loaded.vocabulary.eos_ids,
            capabilities=capabilities_of(self._role, ranks, bool(labels), {*self._options.media, *loaded.media}),
            accepted=frozenset(ACCEPTED),
            adapters=tuple(settings.adapters),
            data_parallel_size=ranks,
            role=self._role,
            engine="mock",
            engine_version=VERSION,
            labels=labels,
        )

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        self._require_awake()
        room = self._context_length - len(request.token_ids)
        limit = room if request.stop.max_tokens is None else min(request.stop.max_tokens, room)
        if limit < 1:
            raise invalid(
                f"The prompt leaves no room in the context of {self._context_length} tokens; shorten it.",
                param="prompt",
            )
        sequence = Running(request, limit, self._arrivals, sink)
        if request.guided is not None:  # refused now if it cannot be followed
            sequence.prepare(self._answer(request, limit))
        self._rank_for(request).submit(sequence, self._start_transfer(sequence))
        self._arrivals += 1

    def abort(self, context: GenerateContext) -> None:
        context.cancelled = True
        for rank in self._ranks:
            rank.abort(context.request_id)

    async def drain(self) -> None:
        for rank in self._ranks:
            await rank.idle.wait()

    async def cleanup(self) -> None:
        await self.tasks.close()
        for rank in self._ranks:
            rank.abort_all()

    def load(self) -> Sequence[Load]:
        return [rank.load() for rank in self._ranks] or [Load()] * len(self._sources)

    def kv_event_sources(self) -> Sequence[KvEventSource]:
        return () if self._role is Role.DECODE else tuple(self._sources)

    async def clear_cache(self) -> None:
        self._require_started()
        self._clear_ranks()

    def _clear_ranks(self) -> None:
        for rank in self._ranks:
            rank.clear_cache()

    async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
        self._require_awake()
        return await asyncio.to_thread(embed, inputs, EMBEDDING_WIDTH, dimensions, lora)

    async def classify(self, inputs: Sequence[array[int]], second_text_at: Sequence[int], lora: str = "") -> Embedded:
        self._require_awake()
        return await asyncio.to_thread(classify, inputs, second_text_at, len(self._options.labels), lora)

    async def control(self, action: str, arguments: Mapping[str, str]) -> dict[str, str]:
        return self._operations.run(action, arguments)

    def metrics_text(self) -> str:
        return self._statistics.text()

    def _make_rank(self, source: KvEventSource) -> Rank:
        settings = self._settings
        scheduler = MockScheduler(
            BlockPool(settings.total_blocks, index=self._role is not Role.DECODE),
            self._timing,
            self._answer,
            block_size=settings.block_size,
            max_sequences=settings.max_sequences,
            max_batched_tokens=settings.max_batched_tokens,
            max_waiting=settings.max_waiting,
        )
        return Rank(scheduler, source, self._operations, self._statistics, self._vocab_size, self._hand_over)

    def _rank_for(self, request: GenerateRequest) -> Rank:
        """Returns the requested rank, else the one with the fewest requests."""
        if request.data_parallel_rank is not None:
            return self._ranks[request.data_parallel_rank]
        return self._ranks[0] if len(self._ranks) == 1 else min(self._ranks, key=Rank.request_count)

    def _require_started(self) -> None:
        if not self._ranks:
            raise starting()

    def _require_awake(self) -> None:
        self._require_started()
        if self._operations.asleep:
            raise SluiceError(
                ErrorKind.UNAVAILABLE, "The engine is asleep; wake it with the action wake.", code="asleep"
            )
        if self._operations.faults.refuse:
            raise injected("requests are rejected", ErrorKind.ENGINE_SHUTDOWN)

    def _answer(self, request: GenerateRequest, limit: int) -> Answer:
        assert self._loaded is not None
        answer = self._loaded.text_generator.answer(request, limit)
        if self._role is Role.PREFILL and len(answer.token_ids) > 1:
            return Answer(answer.token_ids[:1], FinishReason.HANDOFF)
        return answer

    def _hand_over(self, sequence: Running) -> bytes:
        return transfer_of(sequence, self._settings.block_size, KV_TOKEN_BYTES).pack()

    def _start_transfer(self, sequence: Running) -> float:
        """Prepares a sequence prefilled by another worker; returns the duration of its cache transfer in seconds."""
        request = sequence.request
        if request.disaggregation is None or request.disaggregation.role is not Role.DECODE:
            return 0.0
        answer = sequence.answer or self._answer(request, sequence.limit)
        transfer = accept(request.disaggregation.handoff, request, answer, self._settings.block_size)
        sequence.continue_prefilled(answer)
        return transfer.cache_bytes * 8e-9 / TRANSFER_GBPS / self._settings.speedup

    def _wake_ranks(self) -> None:
        for rank in self._ranks:
            rank.wake()
