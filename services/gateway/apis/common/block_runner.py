"""Runs generations whose output is a sequence of blocks, streamed or collected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from services.common.errors import ErrorKind, SluiceError
from services.common.tasks import TaskOwner
from services.gateway.apis.common.media import check_media, started_unless_gone
from services.gateway.apis.common.output import GenerationUsage
from services.gateway.apis.common.sinks import CollectedTurn, EventEncoder, StreamedBlocks, StreamedTurn
from services.gateway.apis.common.translation import TranslatedRequest
from services.gateway.apis.openai.logprobs import Naming
from services.gateway.apis.openai.logprobs_assembler import LogprobsAssembler
from services.gateway.clients.token_bytes import TokenPieces
from services.gateway.core.generation import Generation
from services.gateway.core.request import Sink
from services.gateway.http.degradation import Marked
from services.gateway.http.write_scheduler import WriteScheduler
from services.gateway.pipeline.models import Pipelines
from services.gateway.settings import GatewaySettings


class BlockAnswerRunner:
    """Starts generations and turns them into HTTP responses.

    Args:
        pieces: the bytes of single tokens, for log-probabilities.
    """

    def __init__(
        self, pipelines: Pipelines, settings: GatewaySettings, write_scheduler: WriteScheduler, pieces: TokenPieces
    ) -> None:
        self.pipelines = pipelines
        self._max_unsent = settings.max_unsent_kb << 10
        self._write_scheduler = write_scheduler
        self._pieces = pieces
        self._tasks = TaskOwner()  # background token look-ups; a failure does not stop the service

    def naming(self, model: str) -> Naming:
        """Returns the names of the model's tokens in log-probabilities."""
        return Naming(self._pieces.of(self.pipelines.registry.model(model).model))

    async def stream(
        self,
        translated: TranslatedRequest,
        encoder: EventEncoder,
        started: Callable[[Generation], None] = lambda generation: None,
        fallbacks: Iterable[Marked] = (),
        receive: Receive | None = None,
    ) -> Response:
        """Returns the generation as a server-sent event stream.

        Args:
            started: called with the generation before the encoder writes its first event.
            fallbacks: fallbacks to report in the headers besides those of the generation.
            receive: of the client, whose disconnect ends the start of a request with media items; None: nothing does.
        """
        response = StreamedBlocks(encoder, translated.field_names.rename)

        async def start() -> list[Marked]:
            starting = self._start(translated, response.sinks[0], response.usage)
            if receive is None:
                generation = await starting
            else:
                generation = await started_unless_gone(receive, translated.generation, starting)
            started(generation)
            return [generation, *fallbacks]

        return await response.respond(self._write_scheduler, self._max_unsent, start)

    async def collect(self, http: Request, translated: TranslatedRequest) -> tuple[CollectedTurn, Generation] | None:
        """Returns the completed turn and its generation, or None if the client disconnected.

        Raises:
            SluiceError: with fields named as in the client's API.
        """
        turn = CollectedTurn(translated.field_names.rename)
        starting = self._start(translated, turn, turn.usage)
        generation = await started_unless_gone(http.receive, translated.generation, starting)
        try:
            if not await turn.ended(http.receive):
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
