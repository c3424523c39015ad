"""Local processing of a worker, as configured: tokenization of prompts and chats, and detokenization of output."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.common.packages.model_files import ModelSpec
from services.worker.contract.capabilities import MEDIA, Capability
from services.worker.contract.engine import EngineConfig, Sink
from services.worker.contract.generation import GenerateRequest
from services.worker.generation.response_sink import ResponseSink, SinkParams
from services.worker.local_processing.preparing import PromptPreparation
from services.worker.settings import ProcessingOptions

if TYPE_CHECKING:  # the dependencies of these are not installed beside every engine
    from services.postprocess.streams.factory import StreamFactory
    from services.preprocess.contract.tokenizer import TokenizerProtocol
    from services.preprocess.templates.processes import TemplateProcesses
    from services.worker.local_processing.batch_detokenizer import BatchDetokenizer
    from services.worker.local_processing.prompts import PromptMaker

log = logging.getLogger(__name__)

WAITING_THREADS = 16
"""Threads for tokenizers that run in child processes; they only wait for them."""


class Processing:
    """See `LocalProcessing`; loads tokenizers and detokenizers in the process of the worker.

    Args:
        on_death: called when a background task has failed.
    """

    def __init__(self, options: ProcessingOptions, on_death: Callable[[str, BaseException], None]) -> None:
        self._options = options
        self._on_death = on_death
        self._tasks = TaskOwner(on_death)
        self._templates: TemplateProcesses | None = None
        self._tokenizer: TokenizerProtocol | None = None
        self._prompts: PromptMaker | None = None
        self._detokenizer: BatchDetokenizer | None = None
        self._stream_factory: StreamFactory | None = None
        self._config: EngineConfig | None = None
        self._local_capabilities: frozenset[str] = frozenset()
        self._preparing = PromptPreparation(self.prepare, self._tasks)

    async def start(self, config: EngineConfig) -> EngineConfig:
        """Loads the tokenizer and detokenizer.

        Returns:
            The engine's configuration with the capabilities added by local processing.

        Raises:
            SluiceError: they cannot be loaded although the options require them.
        """
        self._config = config
        if self._options.level == "none" or Capability.TOKEN_IDS not in config.capabilities:
            return config
        try:
            added = await self._load(config)
        except SluiceError as error:
            await self._unload()
            if self._options.required:
                raise
            log.warning("prompt processing is disabled; the worker accepts token ids only: %s", error.message)
            return config
        assert self._tokenizer is not None
        self._local_capabilities = added - config.capabilities  # the engine keeps the capabilities of its own
        self._config = replace(
            config,
            capabilities=config.capabilities | added,
            prompt_fingerprint=config.prompt_fingerprint or self._tokenizer.facts.prompt_fingerprint,
            media_fingerprint=config.media_fingerprint or self._tokenizer.facts.media_fingerprint,
        )
        return self._config

    async def _load(self, config: EngineConfig) -> frozenset[str]:
        """Loads what the options require; returns the capabilities it provides."""
        try:
            from services.worker.local_processing import loading
        except ImportError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"Prompt processing requires the package {error.name}, which is not installed; install "
                "sluice-llm[worker] in the engine's environment, or set --processing none.",
            ) from error
        options, bounds = self._options, self._options.bounds
        spec = ModelSpec(config.model, config.source, config.processor, config.chat_template)
        limits = loading.template_limits(bounds.max_prompt_bytes)
        media = not config.capabilities.isdisjoint(MEDIA)
        self._templates = limits.foreign_templates
        self._tokenizer = await loading.off_loop(
            lambda: loading.load_prompts(spec, config.engine, limits, options.cache_bytes, media)
        )
        if getattr(self._tokenizer, "blocks", False):
            bounds = replace(bounds, threads=WAITING_THREADS)
        self._prompts = loading.PromptMaker(self._tokenizer, bounds)
        provided = {Capability.TEXT}
        if self._tokenizer.facts.has_chat_template:
            provided.add(Capability.MESSAGES)
        if options.level == "full":
            parsers = loading.ParserNames(config.tool_parser, config.reasoning_parser)
            self._detokenizer, self._stream_factory = await loading.load_texts(spec, parsers, self._on_death)
            provided.add(Capability.TEXT_OUT)
        return frozenset(provided)

    def makes_prompt_of(self, request: GenerateRequest) -> bool:
        """See LocalProcessing."""
        kind = Capability.TEXT if request.text is not None else Capability.MESSAGES
        return (request.text is not None or request.messages_json is not None) and kind in self._local_capabilities

    async def prepare(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request with token ids; raises SluiceError as `PromptMaker.prepare` does."""
        assert self._prompts is not None
        assert self._config is not None
        return await self._prompts.prepare(request, self._config)

    def begin(
        self,
        request: GenerateRequest,
        on_prepared: Callable[[GenerateRequest], None],
        fail: Callable[[SluiceError], None],
    ) -> None:
        """See LocalProcessing; runs `prepare`."""
        self._preparing.start(request, on_prepared, fail)

    def give_up(self, request_id: str) -> bool:
        """See LocalProcessing."""
        return self._preparing.give_up(request_id)

    def sink(
        self, request: GenerateRequest, target: ResponseSink, params: SinkParams, stop: Callable[[], None]
    ) -> Sink:
        """See LocalProcessing; the sink in front of `target` detokenizes."""
        if request.text_out is None or self._detokenizer is None or Capability.TEXT_OUT not in self._local_capabilities:
            return target
        return self._detokenizer.open(request, target, params, stop)

    def forget(self, request_id: str) -> None:
        """See LocalProcessing."""
        self.give_up(request_id)
        if self._detokenizer is not None:
            self._detokenizer.forget(request_id)

    async def close(self) -> None:
        """See LocalProcessing."""
        await self._tasks.close()
        await self._unload()

    async def _unload(self) -> None:
        detokenizer, factory, prompts, templates = (
            self._detokenizer,
            self._stream_factory,
            self._prompts,
            self._templates,
        )
        tokenizer, self._tokenizer = self._tokenizer, None
        self._detokenizer = self._stream_factory = self._prompts = self._templates = None
        if detokenizer is not None:
            await detokenizer.close()
        if factory is not None:
            await factory.close()
        if prompts is not None:
            prompts.close()
        if templates is not None:
            await asyncio.to_thread(templates.close)
        if tokenizer is not None:
            await asyncio.to_thread(tokenizer.close)
