"""Runs generations and turns them into answers, streamed or collected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.gateway.backends.rpc.token_bytes import TokenPieces
from services.gateway.core.generation import Generation
from services.gateway.core.request import GenerationRequest
from services.gateway.operations.field_names import FieldNameMap
from services.gateway.operations.logprobs import Naming
from services.gateway.operations.logprobs_assembler import LogprobsAssembler, TokenSink
from services.gateway.operations.media import check_media, started_unless_gone
from services.gateway.operations.operation import EVENT_STREAM, Caller, Marked, Streamed
from services.gateway.operations.output import CollectedResponse, StreamedResponse
from services.gateway.operations.sinks import CollectedTurn, EventEncoder, StreamedBlocks
from services.gateway.pipeline.models import Pipelines


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A generation request and the client's names of its fields, for errors."""

    generation: GenerationRequest
    field_names: FieldNameMap


@dataclass(frozen=True, slots=True)
class ShownTokens:
    """What an answer shows of single tokens.

    Attributes:
        any: anything; the sinks of the answer are then token sinks.
        echo: the prompt's text comes before the output.
        prompt_only: the output is left out.
    """

    any: bool = False
    echo: bool = False
    prompt_only: bool = False


class AnswerRunner:
    """Starts the generations of every API and turns them into answers.

    Answers whose output is a sequence of blocks are made here, by `stream` and `collect`; others bring a response with
    a sink for each choice, for `stream_choices` and `collect_choices`.

    Args:
        pieces: the bytes of single tokens, for log-probabilities.
    """

    def __init__(self, pipelines: Pipelines, pieces: TokenPieces) -> None:
        self.pipelines = pipelines
        self._pieces = pieces
        self._tasks = TaskOwner()  # background token look-ups; a failure does not stop the service

    def naming(self, model: str, as_ids: bool = False) -> Naming:
        """Returns the names of the model's tokens in log-probabilities."""
        return Naming(self._pieces.of(self.pipelines.registry.model(model).model), as_ids)

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
        requests = self._of_blocks(translated)
        response = StreamedBlocks(encoder, translated.field_names.rename)
        shown = ShownTokens(requests[0].logprobs is not None)
        return await self.stream_choices(requests, response, caller, shown, started, fallbacks, media_type)

    async def collect(self, translated: TranslatedRequest, caller: Caller) -> tuple[CollectedTurn, Generation] | None:
        """Returns the completed turn and its generation, or None if the caller is gone.

        Raises:
            SluiceError: with fields named as in the client's API.
        """
        requests = self._of_blocks(translated)
        turn = CollectedTurn(translated.field_names.rename)
        shown = ShownTokens(requests[0].logprobs is not None)
        try:
            generations = await self.collect_choices(requests, turn, caller, shown)
            if generations is None:
                return None
            turn.result()
            return turn, generations[0]
        finally:
            turn.cancel()

    async def stream_choices(
        self,
        requests: Sequence[GenerationRequest],
        response: StreamedResponse,
        caller: Caller,
        shown: ShownTokens,
        started: Callable[[Generation], None] | None = None,
        fallbacks: Iterable[Marked] = (),
        media_type: str = EVENT_STREAM,
    ) -> Streamed:
        """Returns the response as a stream, once the generations of its choices have started; see `stream`."""

        async def start() -> list[Marked]:
            starting = self._start(requests, response, shown)
            generations = await started_unless_gone(caller.gone, requests[0], starting)
            if started is not None:
                started(generations[0])
            return [*generations, *fallbacks]

        return await response.started(start(), media_type)

    async def collect_choices(
        self,
        requests: Sequence[GenerationRequest],
        response: CollectedResponse,
        caller: Caller,
        shown: ShownTokens,
    ) -> list[Generation] | None:
        """Returns the generations once the response has ended, or None if the caller is gone.

        The caller cancels the response, after it has read it.
        """
        starting = self._start(requests, response, shown)
        generations = await started_unless_gone(caller.gone, requests[0], starting)
        return generations if await response.ended(caller.gone) else None

    async def prompt_length(self, translated: TranslatedRequest) -> int:
        """Returns the number of tokens of a prompt; raises SluiceError with fields named as in the client's API."""
        model = self.pipelines.registry.model(translated.generation.model).model
        try:
            check_media(self.pipelines.registry, model, translated.generation.prompt)
            return (await self.pipelines.preprocess.tokenize(model, translated.generation.prompt)).length
        except SluiceError as error:
            raise translated.field_names.rename(error) from None

    def _of_blocks(self, translated: TranslatedRequest) -> list[GenerationRequest]:
        """Returns the request of an answer in blocks, which has no form for a route without a generation."""
        try:
            if self.pipelines.of(translated.generation.model).only_asks():
                raise SluiceError(
                    ErrorKind.FAILED_PRECONDITION,
                    "Query-only requests are not supported here; send them to /v1/chat/completions or /v1/completions.",
                    code="query_only",
                )
            return [self.pipelines.named(translated.generation)]
        except SluiceError as error:
            raise translated.field_names.rename(error) from None

    async def _start(
        self, requests: Sequence[GenerationRequest], response: StreamedResponse | CollectedResponse, shown: ShownTokens
    ) -> list[Generation]:
        """Starts the generations; if one cannot be started, cancels all others.

        Raises:
            SluiceError: with fields named as in the client's API.
        """
        assemblers: list[LogprobsAssembler] = []
        first = 0
        try:
            for request in requests:
                pipeline = self.pipelines.of(request.model)
                sinks: list[Any] = list(response.sinks[first : first + request.choices])
                first += request.choices
                if shown.any:
                    sinks = [self._assembler(sink, request, shown) for sink in sinks]
                    assemblers += sinks
                if shown.echo:
                    text = await pipeline.prompt_text(request)
                    for sink in sinks:
                        sink.echo(text) if shown.any else sink.text(text)
                generation = await pipeline.run(request, sinks)
                response.usage.generations.append(generation)
                if shown.any:
                    for index, sink in enumerate(sinks):
                        sink.begin(generation.tokens_of(index), generation.prompt_ids)
        except BaseException as error:
            response.usage.cancel()
            for assembler in assemblers:
                assembler.discard()
            if isinstance(error, SluiceError):
                raise response.rename_fields(error) from None
            raise
        return response.usage.generations

    def _assembler(self, sink: TokenSink, request: GenerationRequest, shown: ShownTokens) -> LogprobsAssembler:
        with_prompt = request.prompt_logprobs is not None
        return LogprobsAssembler(sink, self._pieces, request.model, self._tasks, with_prompt, shown.prompt_only)
