"""The engine: only what the worker requires of it; what all engines have in common is the worker's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from sluice.engine import (
    SAMPLING,
    Capability,
    Delta,
    EngineConfig,
    GenerateContext,
    GenerateRequest,
    LLMEngine,
    Load,
    Usage,
    WorkerSettings,
    detect_processor,
    fingerprint,
    invalid,
    overloaded,
    read_json,
    read_options,
    resolve,
)
from sluice_parrot.speech import speak


@dataclass(frozen=True)
class ParrotOptions:
    """Holds the options of `--engine-args`, such as `step_ms=10,tokens_a_step=1`."""

    step_ms: float = 2.0
    tokens_a_step: int = 4


class ParrotEngine(LLMEngine):
    """Repeats every prompt. It has no weights, so it starts immediately and needs no accelerator."""

    # The capabilities that requests may use. The output is deterministic, so equal seeds give equal outputs.
    CAPABILITIES = frozenset({Capability.TOKEN_IDS, Capability.SEED, Capability.MIN_TOKENS, Capability.IGNORE_EOS})
    # Options that clients send to every engine and this one ignores. The worker rejects everything else.
    ACCEPTED = SAMPLING - CAPABILITIES - {Capability.ENGINE_OPTIONS}

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._options = read_options(settings.engine_args, ParrotOptions, "parrot")
        self._batch_slots = asyncio.Semaphore(settings.max_sequences)
        self._context_length = 0
        self._eos_token_ids: tuple[int, ...] = ()
        self._running = 0
        self._waiting = 0

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        if settings.role != "aggregated":
            raise invalid(f"The parrot engine does not support the role {settings.role}; use aggregated.", param="role")
        engine = cls(settings)
        if engine._options.step_ms < 0 or engine._options.tokens_a_step < 1:
            raise invalid("step_ms must be at least 0 and tokens_a_step at least 1.", param="engine_args")
        return engine

    async def start(self, worker_id: str) -> EngineConfig:
        self.on_phase("reading the model's files", None)
        settings = self._settings
        path = await asyncio.to_thread(resolve, settings.spec.source)
        config = read_json(path, "config.json")
        if not isinstance(config.get("vocab_size"), int):
            raise invalid(f"config.json in {path} has no vocab_size; add it.", param="model")
        eos = read_json(path, "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
        self._eos_token_ids = tuple(eos if isinstance(eos, list) else [eos] if isinstance(eos, int) else [])
        self._context_length = settings.context_length or config.get("max_position_embeddings", 4096)
        return EngineConfig(
            model=settings.spec.name,
            source=settings.spec.source,
            processor=settings.spec.processor or detect_processor(path),
            fingerprint=await asyncio.to_thread(fingerprint, path),
            context_length=self._context_length,
            vocab_size=config["vocab_size"],
            max_sequences=settings.max_sequences,
            eos_token_ids=self._eos_token_ids,
            capabilities=frozenset(self.CAPABILITIES),
            accepted=frozenset(self.ACCEPTED),
            engine="parrot",
            engine_version="1.0.0",
        )

    async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        async with self._batch_slot():
            speech = speak(request, self._context_length, self._eos_token_ids)
            stride = self._options.tokens_a_step
            for start in range(0, len(speech.token_ids), stride):
                # A cancelled request ends here: the worker cancels the task and notifies the caller.
                await asyncio.sleep(self._options.step_ms / 1000)
                piece = speech.token_ids[start : start + stride]
                yield Delta(token_ids=piece, cached_tokens=0 if start == 0 else None)
            yield Delta(
                finish_reason=speech.reason,
                usage=Usage(len(request.token_ids), len(speech.token_ids)),
                stop_token_id=speech.stop_token_id,
            )

    @asynccontextmanager
    async def _batch_slot(self) -> AsyncIterator[None]:
        """Holds one slot of the batch, waiting for a free one; the queue is bounded."""
        if self._waiting >= self._settings.max_waiting and self._batch_slots.locked():
            raise overloaded("Too many requests are waiting for the parrot engine; retry later.")
        self._waiting += 1
        try:
            await self._batch_slots.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._batch_slots.release()

    def load(self) -> Sequence[Load]:
        return [Load(running_requests=self._running, waiting_requests=self._waiting)]

    async def cleanup(self) -> None:
        await self.tasks.close()
