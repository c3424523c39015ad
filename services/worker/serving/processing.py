"""Processing beside the engine, as an extension provides it: prompts of texts and chats, and texts of tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from services.common.base.errors import ErrorKind, SluiceError, internal
from services.common.packages.extensions import PROCESSING, UnusableExtension, load_extension
from services.worker.contract.capabilities import Capability
from services.worker.contract.engine import EngineConfig, Sink
from services.worker.contract.generation import GenerateRequest
from services.worker.generation.response_sink import ResponseSink, SinkParams
from services.worker.settings import ProcessingOptions

log = logging.getLogger(__name__)

NAME = "worker"
"""The entry point: a class with the parameters options and on_death, of `local_processing`."""


class LocalProcessing(Protocol):
    """Tokenizes prompts and produces output text for one worker."""

    async def start(self, config: EngineConfig) -> EngineConfig:
        """Loads what the options require, and returns the engine's configuration with the added capabilities.

        Raises:
            SluiceError: it cannot be loaded although the options require it.
        """

    def makes_prompt_of(self, request: GenerateRequest) -> bool:
        """Whether the request has a text or chat prompt that is tokenized here instead of in the engine."""

    def begin(
        self,
        request: GenerateRequest,
        on_prepared: Callable[[GenerateRequest], None],
        fail: Callable[[SluiceError], None],
    ) -> None:
        """Tokenizes a prompt in a task, then calls exactly one of the callbacks, unless it is cancelled before."""

    def give_up(self, request_id: str) -> bool:
        """Cancels the tokenization of a request; returns False when there is none."""

    def sink(
        self, request: GenerateRequest, target: ResponseSink, params: SinkParams, stop: Callable[[], None]
    ) -> Sink:
        """Returns the sink for the engine: `target` itself, or one in front of it.

        Args:
            params: limits that the engine is held to.
            stop: aborts the request in the engine.

        Raises:
            SluiceError: INVALID_ARGUMENT with the invalid text option.
        """

    def forget(self, request_id: str) -> None:
        """Drops all state of a request; unknown ids are ignored."""

    async def close(self) -> None:
        """Cancels all tasks and releases everything loaded; idempotent."""


class NoProcessing:
    """See LocalProcessing: token ids only.

    Args:
        missing: why there is none although the options ask for some, as a sentence.
        is_required: whether the worker must not start without it.
    """

    def __init__(self, missing: str = "", is_required: bool = False) -> None:
        self._missing = missing
        self._is_required = is_required

    async def start(self, config: EngineConfig) -> EngineConfig:
        """See LocalProcessing."""
        if self._missing and Capability.TOKEN_IDS in config.capabilities:
            if self._is_required:
                raise SluiceError(ErrorKind.FAILED_PRECONDITION, self._missing, param="processing")
            log.warning("prompt processing is disabled; the worker accepts token ids only: %s", self._missing)
        return config

    def makes_prompt_of(self, request: GenerateRequest) -> bool:
        """See LocalProcessing."""
        return False

    def begin(
        self,
        request: GenerateRequest,
        on_prepared: Callable[[GenerateRequest], None],
        fail: Callable[[SluiceError], None],
    ) -> None:
        """See LocalProcessing; `makes_prompt_of` sends no request here."""
        fail(internal("A worker without processing was to make a prompt."))

    def give_up(self, request_id: str) -> bool:
        """See LocalProcessing."""
        return False

    def sink(
        self, request: GenerateRequest, target: ResponseSink, params: SinkParams, stop: Callable[[], None]
    ) -> Sink:
        """See LocalProcessing."""
        return target

    def forget(self, request_id: str) -> None:
        """See LocalProcessing."""

    async def close(self) -> None:
        """See LocalProcessing."""


def local_processing(options: ProcessingOptions, on_death: Callable[[str, BaseException], None]) -> LocalProcessing:
    """Returns what processes beside the engine, by the options.

    Args:
        on_death: called when a background task has failed.
    """
    if options.level == "none":
        return NoProcessing()
    try:
        make = load_extension(PROCESSING, NAME, "The extension services/worker/local_processing is not installed.")
        processing: LocalProcessing = make(options, on_death)
    except UnusableExtension as error:
        return NoProcessing(str(error), options.required)
    return processing
