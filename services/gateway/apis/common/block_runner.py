"""Runs a turn through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import ErrorKind, SluiceError
from services.common.tasks import TaskOwner
from services.gateway.apis.common.sinks import CollectedTurn, EventEncoder, StreamedTurn
from services.gateway.apis.openai.logprobs import Naming
from services.gateway.apis.openai.logprobs_assembler import LogprobsAssembler
from services.gateway.clients.token_bytes import TokenPieces
from services.gateway.core.request import GenerationRequest
from services.gateway.http.degradation import Marked, mark
from services.gateway.http.sse import EventStream, run_unless_gone
from services.gateway.http.write_scheduler import WriteScheduler
from services.gateway.pipeline.models import Pipelines
from services.gateway.pipeline.pipeline import Generation
from services.gateway.settings import GatewaySettings

Respell = Callable[[SluiceError], SluiceError]


@dataclass(frozen=True, slots=True)
class Fallback:
    """Fallbacks that the API itself took."""

    degraded: set[str]
    migrations: int = 0


class BlockAnswerRunner:
    """Starts turns and answers them, streamed or whole.

    Args:
        pieces: what single tokens stand for, for log-probabilities.
    """

    def __init__(
        self, pipelines: Pipelines, settings: GatewaySettings, write_scheduler: WriteScheduler, pieces: TokenPieces
    ) -> None:
        self.pipelines = pipelines
        self._max_unsent = settings.max_unsent_kb << 10
        self._write_scheduler = write_scheduler
        self._pieces = pieces
        self._tasks = TaskOwner()  # questions beside requests; one that fails ends no service

    def can(self, model: str, capability: str) -> bool:
        """Whether an engine that serves the model has this capability."""
        return any(capability in entry.capabilities for entry in self.pipelines.registry.of_model(model))

    def naming(self, model: str) -> Naming:
        """How the model's tokens are called."""
        return Naming(self._pieces.of(self.pipelines.registry.model(model).model))

    async def stream(
        self,
        request: GenerationRequest,
        encoder: EventEncoder,
        rename_fields: Respell,
        started: Callable[[Generation], None],
        remarks: Iterable[Marked] = (),
    ) -> Response:
        """The turn as events.

        Args:
            started: hears of the generation before the teller is asked for anything.
            remarks: what the answer's headers say besides what happened to the generation.
        """
        turn = StreamedTurn(encoder, rename_fields)
        stream = turn.stream = EventStream(turn, self._write_scheduler, self._max_unsent, {})
        try:
            generation = await self._start(request, turn, rename_fields)
            started(generation)
        except BaseException:
            stream.part()
            raise
        marked = [generation, *remarks]
        stream.before_start = lambda response: mark(response, marked)
        return stream

    async def collect(
        self, http: Request, request: GenerationRequest, rename_fields: Respell
    ) -> tuple[CollectedTurn, Generation] | None:
        """The whole turn, ended; None when the client went away meanwhile.

        Raises:
            SluiceError: in the client's words.
        """
        turn = CollectedTurn(rename_fields)
        generation = await self._start(request, turn, rename_fields)
        try:
            if not await run_unless_gone(http.receive, turn.done, turn.cancel):
                return None
            turn.ended()
            return turn, generation
        finally:
            turn.cancel()

    async def _start(
        self, request: GenerationRequest, turn: StreamedTurn | CollectedTurn, rename_fields: Respell
    ) -> Generation:
        if self.pipelines.of(request.model).only_asks():
            raise rename_fields(_only_asked())
        shows = request.logprobs is not None
        request = self._named(request, rename_fields)
        sink = LogprobsAssembler(turn, self._pieces, request.model, self._tasks) if shows else turn
        try:
            generation = turn.generation = await self.pipelines.of(request.model).start(request, [sink])
        except SluiceError as error:
            raise rename_fields(error) from None
        if isinstance(sink, LogprobsAssembler):
            sink.begin(generation.streams[0].tokens, generation.prompt_ids)
        return generation

    def _named(self, request: GenerationRequest, rename_fields: Respell) -> GenerationRequest:
        try:
            return self.pipelines.named(request)
        except SluiceError as error:
            raise rename_fields(error) from None


def _only_asked() -> SluiceError:
    return SluiceError(
        ErrorKind.FAILED_PRECONDITION,
        "Nothing is run for this request (query-only): /v1/chat/completions and /v1/completions answer which worker "
        "would be chosen.",
        code="query_only",
    )
