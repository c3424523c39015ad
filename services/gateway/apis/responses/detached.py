"""Generates background responses: their states, their events and their failures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from services.common.base.errors import SluiceError, internal
from services.gateway.apis.responses.background import (
    RUNNING,
    BackgroundResponses,
    BackgroundRun,
)
from services.gateway.apis.responses.event_encoder import ResponseEventEncoder
from services.gateway.apis.responses.resource import OutputOptions, Resource
from services.gateway.apis.responses.schemas import ResponsesRequest
from services.gateway.core.generation import Generation
from services.gateway.core.request import SamplingParams
from services.gateway.operations.operation import Caller, Detached, Whole
from services.gateway.operations.output import Counts
from services.gateway.operations.runner import AnswerRunner, TranslatedRequest
from services.gateway.operations.waiting import events_of

log = logging.getLogger(__name__)


class DetachedGeneration:
    """One background response, from queued to its end.

    Args:
        on_end: called with the final response object.
    """

    def __init__(
        self,
        background: BackgroundResponses,
        run: BackgroundRun,
        fields: ResponsesRequest,
        translated: TranslatedRequest,
        options: OutputOptions,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        self._on_end = on_end
        self._background = background
        self._run = run
        self._fields = fields
        self._translated = translated
        self._resource = self._resource_with(SamplingParams())
        self._encoder = ResponseEventEncoder(lambda: self._resource, options, self._update)

    def answer(self, runner: AnswerRunner) -> Detached:
        """Returns the answer to the request, whose work is the generation."""
        queued = self._resource.queued()
        self._update(queued)
        answer = self._background.stream(*self._run.key, 0) if self._fields.stream else Whole(queued)
        return Detached(answer, lambda: self._background.run(self._run, lambda: self._generate(runner)))

    async def _generate(self, runner: AnswerRunner) -> None:
        try:
            caller = Caller({}, self._run.gone)
            streamed = await runner.stream(self._translated, self._encoder, caller, self._started)
            async for events in events_of(streamed.source, caller.gone):
                self._run.add(events)
        except SluiceError as error:
            self._fail(error)
        except Exception:
            log.exception("a background response failed")
            self._fail(internal("Unexpected failure in the gateway; see its log for details."))
        if self._run.state["status"] not in RUNNING:
            return
        if self._run.cancelled:
            self._update(self._encoder.cancelled())
        else:
            self._fail(internal("The response ended without a result."))

    def _started(self, generation: Generation) -> None:
        self._resource = self._resource_with(generation.defaults)
        self._update(self._resource.in_progress())

    def _fail(self, error: SluiceError) -> None:
        if self._run.state["status"] in RUNNING:
            self._run.add(self._encoder.opening(Counts()) + self._encoder.failure(error, Counts()))

    def _update(self, state: dict[str, Any]) -> None:
        if state["status"] not in RUNNING:
            self._on_end(state)
        self._background.update(self._run, state)

    def _resource_with(self, defaults: SamplingParams) -> Resource:
        request_id = self._translated.generation.request_id
        return Resource(request_id, self._fields, defaults, self._fields.previous_response_id)
