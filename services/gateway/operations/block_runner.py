"""Runs generations whose output is a sequence of blocks, streamed or collected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.gateway.backends.clients.token_bytes import TokenPieces
from services.gateway.core.generation import Generation
from services.gateway.core.request import GenerationRequest, Sink
from services.gateway.operations.field_names import FieldNameMap
from services.gateway.operations.logprobs import Naming
from services.gateway.operations.logprobs_assembler import LogprobsAssembler
from services.gateway.operations.media import check_media, started_unless_gone
from services.gateway.operations.operation import EVENT_STREAM, Caller, Marked, Streamed
from services.gateway.operations.output import GenerationUsage
from services.gateway.operations.sinks import CollectedTurn, EventEncoder, StreamedBlocks, StreamedTurn
from services.gateway.pipeline.models import Pipelines


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A generation request and the client's names of its fields, for errors."""

    generation: GenerationRequest
    field_names: FieldNameMap


class BlockAnswerRunner:
    """Starts generations and turns them into answers.

    Args:
        pieces: the bytes of single tokens, for log-probabilities.
    """

    def __init__(self, pipelines: Pipelines, pieces: TokenPieces) -> None:
        self.pipelines = pipelines
        self._pieces = pieces
        self._tasks = TaskOwner()  # background token look-ups; a failure does not stop the service

    def naming(self, model: str) -> Naming:
        """Returns the names of the model's tokens in log-probabilities."""
        return Naming(self._pieces.of(self.pipelines.registry.model(model).model))

    async def stream(
        self,
        translated: TranslatedRequest,
        encoder: EventEncoder,
        caller: Caller,
        started: Callable[[Generation], None] | None = None,
        fallbacks: Iterable[Marked] = (),
        media_type: str = EVENT_STREAM,
    ) -> Streamed:
        """Returns the generation as a stream of the encoder's events.

        Args:
            started: called with the generation before the encoder writes its first event.
            fallbacks: fallbacks to report besides those of the generation.
        """
        response = StreamedBlocks(encoder, translated.field_names.rename)

        async def start() -> list[Marked]:
            starting = self._start(translated, response.sinks[0], response.usage)
            generation = await started_unless_gone(caller.gone, translated.generation, starting)
            if started is not None:
                started(generation)
            return [generation, *fallbacks]

        return await response.started(start(), media_type)

    async def collect(self, translated: TranslatedRequest, caller: Caller) -> tuple[CollectedTurn, Generation] | None:
        """Returns the completed turn and its generation, or None if the caller is gone.

        Raises:
            SluiceError: with fields named as in the client's API.
        """
        turn = CollectedTurn(translated.field_names.rename)
        starting = self._start(translated, turn, turn.usage)
        generation = await started_unless_gone(caller.gone, translated.generation, starting)
        try:
            if not await turn.ended(caller.gone):
                return None
            turn.result()
            return turn, generation
        finally:
            turn.cancel()

    async def prompt_length(self, translated: TranslatedRequest) -> int:
        """Returns the number of tokens of a prompt; raises SluiceError with fields named as in the client's API."""
        model = self.pipelines.registry.model(translated.generation.model).model
        try:
            check_media(self.pipelines.registry, model, translated.generation.prompt)
            return (await self.pipelines.preprocess.tokenize(model, translated.generation.prompt)).length
        except SluiceError as error:
            raise translated.field_names.rename(error) from None

    async def _start(
        self, translated: TranslatedRequest, turn: StreamedTurn | CollectedTurn, usage: GenerationUsage
    ) -> Generation:
        request, rename_fields = translated.generation, translated.field_names.rename
        if self.pipelines.of(request.model).only_asks():
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "Query-only requests are not supported here; send them to /v1/chat/completions or /v1/completions.",
                code="query_only",
            )
        with_logprobs = request.logprobs is not None
        try:
            request = self.pipelines.named(request)
            sink = LogprobsAssembler(turn, self._pieces, request.model, self._tasks) if with_logprobs else turn
            generation = await self.pipelines.of(request.model).run(request, [cast("Sink", sink)])
        except SluiceError as error:
            raise rename_fields(error) from None
        usage.generations.append(generation)
        if isinstance(sink, LogprobsAssembler):
            sink.begin(generation.tokens_of(0), generation.prompt_ids)
        return generation
