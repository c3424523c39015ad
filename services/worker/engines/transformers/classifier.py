"""Serves models for sequence classification, such as cross-encoders, with transformers."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from services.common.base.errors import invalid
from services.common.packages import model_files as models
from services.worker.contract.capabilities import Capability
from services.worker.contract.engine import Embedded, EngineConfig, GenerateContext, Load, Sink
from services.worker.contract.generation import GenerateRequest
from services.worker.engines.inprocess.card import labels_of
from services.worker.engines.inprocess.engine import InProcessEngine, classes_only, starting
from services.worker.engines.shared.download import download
from services.worker.engines.transformers import options
from services.worker.engines.transformers.folder import ModelFolder, read_folder
from services.worker.engines.transformers.starting import DEFAULT_BATCH, require_library
from services.worker.settings import WorkerSettings


class ClassifierEngine(InProcessEngine):
    """Computes the probabilities of a model's classes for texts and pairs of texts; generates no text."""

    CAPABILITIES: ClassVar[frozenset[Capability]] = frozenset({Capability.TOKEN_IDS, Capability.CLASSIFICATION})

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._options = options.read(settings.engine_args)
        self._model: Any = None
        self._passes = 0
        self._one_pass = asyncio.Lock()

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        if settings.role != "aggregated" or settings.engine_flags or settings.adapters:
            raise invalid(
                "The transformers-classifier engine has no roles, no adapters and no options after --.", param="engine"
            )
        return cls(settings)

    async def start(self, worker_id: str) -> EngineConfig:
        await download(self._settings.spec.source, self.on_phase)
        self.on_phase("loading weights", None)
        folder, self._model, version = await asyncio.to_thread(self._load)
        return self._describe(folder, version)

    def _load(self) -> tuple[ModelFolder, Any, str]:
        folder = read_folder(self._settings.spec.source)
        if not labels_of(folder.config):
            raise invalid(
                f"config.json in {folder.path} has no architecture for sequence classification; serve this model with "
                "--engine transformers.",
                param="model",
            )
        require_library()
        from services.worker.engines.transformers import loading

        model = loading.load_model(folder, self._options, loading.device_of(self._options), kind="classes")
        return folder, model, loading.VERSION

    def _describe(self, folder: ModelFolder, version: str) -> EngineConfig:
        settings, labels = self._settings, labels_of(folder.config)
        return EngineConfig(
            model=settings.spec.name,
            source=settings.spec.source,
            processor=settings.spec.processor or models.detect_processor(folder.path),
            fingerprint=models.fingerprint(folder.path),
            context_length=settings.context_length or folder.context_length,
            vocab_size=folder.vocab_size,
            block_size=0,
            total_blocks=0,
            max_sequences=settings.max_sequences,
            max_batched_tokens=settings.max_batched_tokens,
            eos_token_ids=folder.eos_token_ids,
            capabilities=frozenset(map(str, self.CAPABILITIES)),
            engine="transformers-classifier",
            engine_version=version,
            labels=labels,
        )

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        raise classes_only()

    def abort(self, context: GenerateContext) -> None:
        context.cancelled = True

    async def drain(self) -> None:
        async with self._one_pass:
            return

    async def cleanup(self) -> None:
        await self.tasks.close()
        self._model = None

    def load(self) -> Sequence[Load]:
        return [Load(running_requests=self._passes)]

    async def classify(self, inputs: Sequence[array[int]], second_text_at: Sequence[int], lora: str = "") -> Embedded:
        from services.worker.engines.transformers.embedding import classify

        if self._model is None:
            raise starting()
        most = min(self._settings.max_batched_tokens, DEFAULT_BATCH)
        self._passes += 1
        try:
            async with self._one_pass:
                found = await asyncio.to_thread(classify, self._model, inputs, second_text_at, most)
        finally:
            self._passes -= 1
        return Embedded(found, sum(map(len, inputs)))
