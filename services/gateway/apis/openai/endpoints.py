"""The OpenAI endpoints: parse, start the generations, answer whole or as a stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from services.common import logs
from services.common.errors import invalid
from services.common.observability import telemetry
from services.common.tasks import TaskOwner
from services.gateway.admission import permit as permits
from services.gateway.apis.openai.choices import (
    CollectedChoice,
    CollectedChoices,
    StreamedChoice,
    StreamedChoices,
    Usage,
)
from services.gateway.apis.openai.completion_objects import ChatFormat, CompletionFormat, Format
from services.gateway.apis.openai.detailed_choices import DetailedCollectedChoice, DetailedStreamedChoice, DetailOptions
from services.gateway.apis.openai.error_params import client_names
from services.gateway.apis.openai.logprobs import Naming
from services.gateway.apis.openai.logprobs_assembler import LogprobsAssembler, TokenSink
from services.gateway.apis.openai.prompt_transforms import needs_resolving, resolve
from services.gateway.apis.openai.route_query import answer_query
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from services.gateway.apis.openai.translate import chat_request, completion_requests
from services.gateway.apis.openai.validation import check
from services.gateway.clients.token_bytes import TokenPieces
from services.gateway.core import routing_hints as hints
from services.gateway.core.request import GenerationRequest
from services.gateway.http.body import read_json
from services.gateway.http.body_memory import BodyMemory
from services.gateway.http.degradation import mark
from services.gateway.http.sse import EventStream, run_unless_gone
from services.gateway.http.write_scheduler import WriteScheduler
from services.gateway.pipeline import session_affinity as sessions
from services.gateway.pipeline.models import Pipelines
from services.gateway.pipeline.pipeline import Pipeline
from services.gateway.settings import GatewaySettings
from services.gateway.workers.registry import WorkerEntry
from services.gateway.workers.tokenizer_parity import TokenizerParity

CLIENT_CLOSED_REQUEST = 499


class OpenAIEndpoints:
    """Chat completions, completions and models.

    Args:
        pieces: what single tokens stand for.
        bodies: memory of all request bodies.
    """

    def __init__(
        self,
        pipelines: Pipelines,
        settings: GatewaySettings,
        write_scheduler: WriteScheduler,
        parity: TokenizerParity,
        pieces: TokenPieces,
        bodies: BodyMemory | None = None,
    ) -> None:
        self._pipelines = pipelines
        self._settings = settings
        self._budgets = settings.budgets
        self._write_scheduler = write_scheduler
        self._parity = parity
        self._pieces = pieces
        self._bodies = bodies
        self._tasks = TaskOwner()  # questions beside requests; one that fails ends no service

    async def chat_completions(self, request: Request) -> Response:
        """Create a chat completion."""
        body = await self._body(request)
        fields = check(ChatCompletionRequest, body, self._budgets)
        answer_id = ChatFormat.id_prefix + secrets.token_hex(12)
        forces = any("guided_json" in entry.capabilities for entry in self._pipelines.registry.of_model(fields.model))
        generation = chat_request(body, fields, answer_id, self._settings.max_choices, self._budgets, forces)
        form = ChatFormat(answer_id, int(time.time()), fields.model, fields.include_usage)
        return await self._answer(request, [generation], form, fields)

    async def completions(self, request: Request) -> Response:
        """Create a completion."""
        body = await self._body(request)
        fields = check(CompletionRequest, body, self._budgets)
        answer_id = CompletionFormat.id_prefix + secrets.token_hex(12)
        asked = fields, answer_id, self._settings.max_choices, self._budgets
        if fields.prompt_embeds is None:
            generations = completion_requests(*asked)
        else:  # megabytes to read
            generations = await asyncio.to_thread(completion_requests, *asked)
        form = CompletionFormat(answer_id, int(time.time()), fields.model, fields.include_usage)
        return await self._answer(request, generations, form, fields)

    async def models(self) -> dict[str, Any]:
        """The models that workers serve now."""
        await self._parity.freshen()
        permit = permits.current()
        return {
            "object": "list",
            "data": [self._shown(name, entry) for name, entry in self._served() if permit.may_use(name)],
        }

    async def model(self, name: str) -> dict[str, Any]:
        """One of them; SluiceError(PERMISSION_DENIED, NOT_FOUND or UNAVAILABLE) when the key may not use it, or nobody
        serves it."""
        permits.current().check_model(name)
        entry = self._pipelines.registry.model(name)
        await self._parity.freshen()
        return self._shown(name, entry)

    def _served(self) -> list[tuple[str, WorkerEntry]]:
        """Models, then the LoRA adapters that can be named in their place."""
        registry = self._pipelines.registry
        return [*registry.models.items(), *registry.adapters.items()]

    def _shown(self, name: str, entry: WorkerEntry) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": entry.created_unix_s,
            "owned_by": "sluice",
            "max_model_len": entry.context_length,
            "tokenizer": self._parity.of_model(entry.model),
            **({} if name == entry.model else {"parent": entry.model, "root": entry.model}),
        }

    async def _body(self, request: Request) -> dict[str, Any]:
        limit = int(self._settings.max_body_mb * (1 << 20))
        return await read_json(request, limit, self._settings.body_timeout_s, self._budgets.values, self._bodies)

    async def _answer(
        self, request: Request, generations: list[GenerationRequest], form: Format, fields: GenerationFields
    ) -> Response:
        logs.request_id.set(generations[0].request_id)
        generations = [self._pipelines.named(one) for one in generations]
        pipeline = self._pipelines.of(fields.model)
        answer = self._stream if fields.stream else self._collect
        label = fields.request_id or fields.rid
        with telemetry.stage("gateway.request", dict(request.headers), model=fields.model, client_request_id=label):
            if needs_resolving(fields):
                entry = self._pipelines.registry.model(fields.model)
                generations = [await resolve(one, fields, entry, self._pipelines.preprocess) for one in generations]
            if fields.nvext is not None:
                hints.add(fields.nvext.hints())
            if fields.data_parallel_rank is not None:
                _run_at(pipeline, fields.data_parallel_rank)
            sessions.begin(self._settings.session_sources, request.headers, fields.session_names)
            if pipeline.only_asks():
                return await answer_query(pipeline, generations, form)
            return await answer(request, generations, form, fields)

    async def _stream(
        self, request: Request, generations: list[GenerationRequest], form: Format, fields: GenerationFields
    ) -> Response:
        asked = detail_options(fields)
        make = None
        if asked.any:
            naming = self._naming(fields)

            def make(index: int, events: StreamedChoices) -> StreamedChoice:
                return DetailedStreamedChoice(index, events, asked, naming)

        number = sum(one.choices for one in generations)
        choices = StreamedChoices(form, number, fields.include_usage, _drops_reasoning(generations), make)
        stream = choices.stream = EventStream(choices, self._write_scheduler, self._settings.max_unsent_kb << 10, {})
        choices.names = client_names(fields, generations[0])
        try:
            await self._start(generations, choices.sinks, choices.usage, asked)
        except BaseException:
            stream.part()
            raise
        used = choices.usage.generations
        stream.before_start = lambda response: mark(response, used)
        return stream

    async def _collect(
        self, request: Request, generations: list[GenerationRequest], form: Format, fields: GenerationFields
    ) -> Response:
        asked = detail_options(fields)
        make = None
        if asked.any:
            naming = self._naming(fields)

            def make(choices: CollectedChoices) -> CollectedChoice:
                return DetailedCollectedChoice(choices, form, asked, naming)

        choices = CollectedChoices(sum(one.choices for one in generations), _drops_reasoning(generations), make)
        choices.names = client_names(fields, generations[0])
        try:
            await self._start(generations, choices.sinks, choices.usage, asked)
            if not await run_unless_gone(request.receive, choices.done, choices.usage.cancel):
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            answer = form.whole(choices.answers(), choices.usage.counts(), _of_prompt(form, choices))
        finally:
            choices.cancel()
        response = Response(orjson.dumps(answer), media_type="application/json")
        mark(response, choices.usage.generations)
        return response

    async def _start(
        self, generations: list[GenerationRequest], choices: Any, usage: Usage, asked: DetailOptions
    ) -> None:
        usage.only_prompt = asked.only_prompt
        assemblers: list[LogprobsAssembler] = []
        first = 0
        try:
            for one in generations:
                sinks = choices[first : first + one.choices]
                first += one.choices
                if asked.any:
                    sinks = [self._assembler(sink, one, asked) for sink in sinks]
                    assemblers += sinks
                if asked.echo:
                    text = await self._pipelines.of(one.model).prompt_text(one)
                    for sink in sinks:
                        sink.echo(text) if isinstance(sink, LogprobsAssembler) else sink.text(text)
                generation = await self._pipelines.of(one.model).start(one, sinks)
                usage.generations.append(generation)
                if asked.any:
                    prompt_ids = generation.prompt_ids
                    for sink, stream in zip(sinks, generation.streams, strict=True):
                        sink.begin(stream.tokens, prompt_ids)
        except BaseException:
            usage.cancel()
            for assembler in assemblers:
                assembler.forget()
            raise

    def _assembler(self, sink: TokenSink, request: GenerationRequest, asked: DetailOptions) -> LogprobsAssembler:
        of_prompt = request.prompt_logprobs is not None
        return LogprobsAssembler(sink, self._pieces, request.model, self._tasks, of_prompt, asked.only_prompt)

    def _naming(self, fields: GenerationFields) -> Naming:
        entry = self._pipelines.registry.model(fields.model)
        return Naming(self._pieces.of(entry.model), bool(fields.return_tokens_as_token_ids))


def _run_at(pipeline: Pipeline, rank: int) -> None:
    if pipeline.config.routing != "direct":
        raise invalid(
            "data_parallel_rank is not supported: the router chooses it (routing direct takes it, with a worker).",
            param="data_parallel_rank",
            code="unsupported_parameter",
        )
    hints.at_rank(rank)


def detail_options(fields: GenerationFields) -> DetailOptions:
    """What a request wants to hear besides text."""
    echo = isinstance(fields, CompletionRequest) and bool(fields.echo)
    asked = _asks_logprobs(fields)
    return DetailOptions(
        logprobs=asked,
        prompt_logprobs=fields.prompt_logprobs is not None,
        token_ids=bool(fields.return_token_ids),
        continuous_usage=fields.continuous_usage,
        only_prompt=echo and fields.max_tokens == 0,
        echo=echo,
        echo_logprobs=echo and asked,
    )


def _asks_logprobs(fields: GenerationFields) -> bool:
    """Whether the tokens of the answer come with log-probabilities; a completion asks for none of the alternatives
    with 0."""
    if isinstance(fields, CompletionRequest):
        return fields.logprobs is not None
    return isinstance(fields, ChatCompletionRequest) and bool(fields.logprobs)


def _drops_reasoning(generations: list[GenerationRequest]) -> bool:
    return any(one.parsing is not None and one.parsing.drop_reasoning for one in generations)


def _of_prompt(form: Format, choices: CollectedChoices) -> dict[str, Any]:
    """What a chat's answer says of its prompt."""
    first = choices.sinks[0] if choices.sinks else None
    return first.of_prompt() if isinstance(first, DetailedCollectedChoice) and not form.prompt_in_choice else {}
