"""What a worker does beside its engine, as far as it is told to: prompts of text and chats, text of tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from services.common.errors import SluiceError
from services.common.models import ModelSpec
from services.common.tasks import TaskOwner
from services.postprocess.opening import Opener
from services.postprocess.parsers.registry import ParserNames
from services.preprocess.template_process import TemplateProcesses
from services.preprocess.tokenizer import TokenizerProtocol
from services.worker.capabilities import Capability
from services.worker.delivery import Delivery, Terms
from services.worker.engine import EngineConfig, Sink
from services.worker.generation import GenerateRequest
from services.worker.processing.completing import completed
from services.worker.processing.loading import (
    end,
    load_prompts,
    load_texts,
    loaded_off_loop,
    spec_for,
    template_limits,
)
from services.worker.processing.preparing import Preparing
from services.worker.processing.prompts import CHAT, TEXT, PromptBounds, PromptMaker
from services.worker.processing.texts import TextDesk
from services.worker.validation import validate_made_prompt

log = logging.getLogger(__name__)

WAITING_THREADS = 16
"""For tokenizers in processes of their own: these threads only wait."""

Level = Literal["none", "prompts", "full"]


@dataclass(frozen=True, slots=True)
class ProcessingOptions:
    """What is done here.

    Attributes:
        level: nothing; prompts; prompts and texts.
        required: the worker cannot do without; otherwise it serves token ids when the tokenizer cannot be loaded.
        cache_bytes: memory for ids of earlier prompts.
    """

    level: Level = "prompts"
    required: bool = False
    cache_bytes: int = 16 << 20
    bounds: PromptBounds = field(default_factory=PromptBounds)


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
        self._texts: TextDesk | None = None
        self._opener: Opener | None = None
        self._config: EngineConfig | None = None
        self._made_here: frozenset[str] = frozenset()
        self.preparing = Preparing(self.prepare, self._tasks)

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
        options, bounds = self._options, self._options.bounds
        spec = ModelSpec(config.model, config.source, config.processor, config.chat_template)
        limits = template_limits(bounds.max_prompt_bytes)
        self._templates = limits.foreign_templates
        self._tokenizer = await loaded_off_loop(
            lambda: load_prompts(spec_for(spec, config.engine), limits, options.cache_bytes)
        )
        if getattr(self._tokenizer, "blocks", False):
            bounds = replace(bounds, threads=WAITING_THREADS)
        self._prompts = PromptMaker(self._tokenizer, bounds)
        won = {Capability.TEXT}
        if self._tokenizer.facts.has_chat_template:
            won.add(Capability.MESSAGES)
        if options.level == "full":
            self._texts, self._opener = await load_texts(
                spec, ParserNames(config.tool_parser, config.reasoning_parser), self._on_death
            )
            won.add(Capability.TEXT_OUT)
        return frozenset(won)

    def makes_prompt_of(self, request: GenerateRequest) -> bool:
        """The request has no ids, and they are made here."""
        kind = Capability.TEXT if request.text is not None else Capability.MESSAGES
        return (request.text is not None or request.messages_json is not None) and kind in self._made_here

    async def prepare(self, request: GenerateRequest) -> GenerateRequest:
        """The same request with ids.

        Raises:
            SluiceError: as `PromptMaker.make`; INVALID_ARGUMENT when the prompt does not fit.
        """
        assert self._prompts is not None
        assert self._tokenizer is not None
        assert self._config is not None
        made = await self._prompts.make(request)
        validate_made_prompt(made.token_ids, self._config, TEXT if made.body is None else CHAT)
        return completed(request, made, self._tokenizer.facts, self._config.context_length)

    def sink(self, request: GenerateRequest, target: Delivery, terms: Terms, stop: Callable[[], None]) -> Sink:
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
        if tokenizer is not None:
            await asyncio.to_thread(end, tokenizer)
