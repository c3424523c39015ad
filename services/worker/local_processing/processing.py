"""What a worker does beside its engine, as far as it is told to: prompts of text and chats, text of tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from services.common.errors import ErrorKind, SluiceError
from services.common.models import ModelSpec
from services.common.tasks import TaskOwner
from services.worker.contract.capabilities import Capability
from services.worker.contract.engine import EngineConfig, Sink
from services.worker.contract.generation import GenerateRequest
from services.worker.generation.response_sink import ResponseSink, SinkParams
from services.worker.local_processing.preparing import PromptPreparation
from services.worker.processing_options import ProcessingOptions

if TYPE_CHECKING:  # what these need is not there in every environment of an engine
    from services.postprocess.streams.factory import StreamFactory
    from services.preprocess.protocol import TokenizerProtocol
    from services.preprocess.templates.processes import TemplateProcesses
    from services.worker.local_processing.batch_detokenizer import BatchDetokenizer
    from services.worker.local_processing.prompts import PromptMaker

log = logging.getLogger(__name__)

WAITING_THREADS = 16
"""For tokenizers in processes of their own: these threads only wait."""


class Processing:
    """The prompts and texts of one worker.

    Args:
        on_death: a background task failed.

    Attributes:
        preparing: the requests whose prompts are being made.
    """

    def __init__(self, options: ProcessingOptions, on_death: Callable[[str, BaseException], None]) -> None:
        self._options = options
        self._on_death = on_death
        self._tasks = TaskOwner(on_death)
        self._templates: TemplateProcesses | None = None
        self._tokenizer: TokenizerProtocol | None = None
        self._prompts: PromptMaker | None = None
        self._texts: BatchDetokenizer | None = None
        self._opener: StreamFactory | None = None
        self._config: EngineConfig | None = None
        self._made_here: frozenset[str] = frozenset()
        self.preparing = PromptPreparation(self.prepare, self._tasks)

    async def start(self, config: EngineConfig) -> EngineConfig:
        """Loads what it takes.

        Returns:
            What the worker serves: the engine's part and what is done here.

        Raises:
            SluiceError: it cannot be loaded, and the worker was told to do it.
        """
        self._config = config
        if self._options.level == "none":
            return config
        try:
            won = await self._load(config)
        except SluiceError as error:
            await self._unload()
            if self._options.required:
                raise
            log.warning("the worker makes no prompts and takes token ids only: %s", error.message)
            return config
        assert self._tokenizer is not None
        self._made_here = won - config.capabilities  # what an engine does itself stays the engine's
        self._config = replace(
            config,
            capabilities=config.capabilities | won,
            prompt_fingerprint=config.prompt_fingerprint or self._tokenizer.facts.prompt_fingerprint,
        )
        return self._config

    async def _load(self, config: EngineConfig) -> frozenset[str]:
        """The capabilities that are won."""
        try:
            from services.worker.local_processing import loading
        except ImportError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"Making prompts needs the package {error.name}, which is not installed beside this engine; install "
                "what sluice-llm[worker] lists, or set --processing none.",
            ) from error
        options, bounds = self._options, self._options.bounds
        spec = ModelSpec(config.model, config.source, config.processor, config.chat_template)
        limits = loading.template_limits(bounds.max_prompt_bytes)
        self._templates = limits.foreign_templates
        self._tokenizer = await loading.off_loop(
            lambda: loading.load_prompts(loading.spec_for(spec, config.engine), limits, options.cache_bytes)
        )
        if getattr(self._tokenizer, "blocks", False):
            bounds = replace(bounds, threads=WAITING_THREADS)
        self._prompts = loading.PromptMaker(self._tokenizer, bounds)
        won = {Capability.TEXT}
        if self._tokenizer.facts.has_chat_template:
            won.add(Capability.MESSAGES)
        if options.level == "full":
            parsers = loading.ParserNames(config.tool_parser, config.reasoning_parser)
            self._texts, self._opener = await loading.load_texts(spec, parsers, self._on_death)
            won.add(Capability.TEXT_OUT)
        return frozenset(won)

    def makes_prompt_of(self, request: GenerateRequest) -> bool:
        """The request has no ids, and they are made here."""
        kind = Capability.TEXT if request.text is not None else Capability.MESSAGES
        return (request.text is not None or request.messages_json is not None) and kind in self._made_here

    async def prepare(self, request: GenerateRequest) -> GenerateRequest:
        """The same request with ids; SluiceError as `PromptMaker.prepare`."""
        assert self._prompts is not None
        assert self._config is not None
        return await self._prompts.prepare(request, self._config)

    def sink(self, request: GenerateRequest, target: ResponseSink, terms: SinkParams, stop: Callable[[], None]) -> Sink:
        """Where the engine puts the tokens of a request: before its delivery, if text is to be made of them.

        Args:
            terms: what the engine is held to by that place.
            stop: ends the request in the engine.

        Raises:
            SluiceError: INVALID_ARGUMENT naming what is wrong with the options of the text.
        """
        if request.text_out is None or self._texts is None or Capability.TEXT_OUT not in self._made_here:
            return target
        return self._texts.open(request, target, terms, stop)

    def forget(self, request_id: str) -> None:
        """Nobody waits for this request any more; unknown ones are ignored."""
        self.preparing.give_up(request_id)
        if self._texts is not None:
            self._texts.forget(request_id)

    async def close(self) -> None:
        """Ends everything; may be called twice."""
        await self._tasks.close()
        await self._unload()

    async def _unload(self) -> None:
        texts, opener, prompts, templates = self._texts, self._opener, self._prompts, self._templates
        tokenizer, self._tokenizer = self._tokenizer, None
        self._texts = self._opener = self._prompts = self._templates = None
        if texts is not None:
            await texts.close()
        if opener is not None:
            await opener.close()
        if prompts is not None:
            prompts.close()
        if templates is not None:
            await asyncio.to_thread(templates.close)
        if (close := getattr(tokenizer, "close", None)) is not None:
            await asyncio.to_thread(close)
