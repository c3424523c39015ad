"""The endpoints of chat completions, completions and models."""

from __future__ import annotations

import asyncio
import time
from os import urandom
from typing import Any

from services.common.base import logs
from services.common.base.errors import invalid
from services.common.observability import telemetry
from services.gateway.apis.openai.choices import ChunkedChoice, CollectedChoice, CollectedChoices, StreamedChoices
from services.gateway.apis.openai.completion_objects import ChatFormat, CompletionFormat, Format, usage
from services.gateway.apis.openai.detailed_choices import DetailedCollectedChoice, DetailedStreamedChoice, DetailOptions
from services.gateway.apis.openai.prompt_transforms import needs_tokenizer, resolve_all
from services.gateway.apis.openai.route_query import query_response
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from services.gateway.apis.openai.translate import chat_request, client_names, completion_requests
from services.gateway.apis.openai.validation import check
from services.gateway.backends.workers.capabilities import modalities
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.backends.workers.tokenizer_parity import TokenizerParity
from services.gateway.core import context
from services.gateway.core.request import GenerationRequest
from services.gateway.operations.logprobs import Naming
from services.gateway.operations.media import release_media, with_media
from services.gateway.operations.operation import Answer, Caller, Streamed, Whole
from services.gateway.operations.runner import AnswerRunner
from services.gateway.pipeline.pipeline import Pipeline
from services.gateway.pipeline.session_affinity import enter_session
from services.gateway.settings import GatewaySettings


class OpenAIOperations:
    """Handlers of chat completions, completions and models."""

    def __init__(self, runner: AnswerRunner, settings: GatewaySettings, parity: TokenizerParity) -> None:
        self._runner = runner
        self._pipelines = runner.pipelines
        self._settings = settings
        self._budgets = settings.budgets
        self._parity = parity

    async def chat_completions(self, body: dict[str, Any], caller: Caller) -> Answer | None:
        """Create a chat completion."""
        fields = check(ChatCompletionRequest, body, self._budgets)
        completion_id = ChatFormat.id_prefix + urandom(12).hex()
        forces_calls = self._pipelines.registry.has_capability(fields.model, "guided_json")
        generation = await with_media(
            body["messages"],
            chat_request,
            body,
            fields,
            completion_id,
            self._settings.max_choices,
            self._budgets,
            forces_calls,
        )
        release_media(body["messages"])
        form = ChatFormat(completion_id, int(time.time()), fields.model, fields.include_usage)
        return await self.respond(caller, [generation], form, fields)

    async def completions(self, body: dict[str, Any], caller: Caller) -> Answer | None:
        """Create a completion."""
        fields = check(CompletionRequest, body, self._budgets)
        completion_id = CompletionFormat.id_prefix + urandom(12).hex()
        arguments = fields, completion_id, self._settings.max_choices, self._budgets
        if fields.prompt_embeds is None:
            generations = completion_requests(*arguments)
        else:  # decoding embeddings of megabytes would block the event loop
            generations = await asyncio.to_thread(completion_requests, *arguments)
        form = CompletionFormat(completion_id, int(time.time()), fields.model, fields.include_usage)
        return await self.respond(caller, generations, form, fields)

    async def models(self) -> dict[str, Any]:
        """Returns the served models that the API key may use."""
        await self._parity.freshen()
        permit = context.current().permit
        return {
            "object": "list",
            "data": [self._model_object(name, entry) for name, entry in self._served() if permit.may_use(name)],
        }

    async def model(self, name: str) -> dict[str, Any]:
        """Returns one model.

        Raises:
            SluiceError: PERMISSION_DENIED if the API key may not use it; NOT_FOUND or UNAVAILABLE if it is not served.
        """
        context.current().permit.check_model(name)
        entry = self._pipelines.registry.model(name)
        await self._parity.freshen()
        return self._model_object(name, entry)

    def _served(self) -> list[tuple[str, WorkerEntry]]:
        """Returns the models, then the LoRA adapters that requests can use as model names."""
        registry = self._pipelines.registry
        return [*registry.models.items(), *registry.adapters.items()]

    def _model_object(self, name: str, entry: WorkerEntry) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": entry.created_unix_s,
            "owned_by": "sluice",
            "max_model_len": entry.context_length,
            "tokenizer": self._parity.of_model(entry.model),
            "root": entry.model,
            "parent": None if name == entry.model else entry.model,
            "modalities": modalities(self._pipelines.registry.of_model(entry.model), self._parity.media(entry.model)),
        }

    async def respond(
        self, caller: Caller, generations: list[GenerationRequest], form: Format, fields: GenerationFields
    ) -> Answer | None:
        """Runs the generations of a validated request and returns the answer, streamed or as a whole."""
        logs.request_id.set(generations[0].request_id)
        generations = [self._pipelines.named(generation) for generation in generations]
        pipeline = self._pipelines.of(fields.model)
        respond = self._stream if fields.stream else self._collect
        label = fields.request_id or fields.rid
        with telemetry.stage(
            "gateway.request", telemetry.carrier_of_headers(caller.headers), model=fields.model, client_request_id=label
        ):
            if needs_tokenizer(fields):
                entry = self._pipelines.registry.model(fields.model)
                permit = context.current().permit
                generations = await resolve_all(generations, fields, entry, self._pipelines.preprocess, permit)
            _enter_hints(fields, pipeline)
            enter_session(self._settings.session_sources, caller.headers, fields.session_names)
            if pipeline.only_asks():
                return await query_response(pipeline, generations, form)
            return await respond(caller, generations, form, fields)

    async def _stream(
        self, caller: Caller, generations: list[GenerationRequest], form: Format, fields: GenerationFields
    ) -> Streamed:
        options = detail_options(fields)
        make = None
        if options.any:
            naming = self._naming(fields)

            def make(index: int, choices: StreamedChoices) -> ChunkedChoice:
                return DetailedStreamedChoice(index, choices, options, naming)

        choices = StreamedChoices(
            form,
            sum(generation.choices for generation in generations),
            fields.include_usage,
            client_names(fields, generations[0]).rename,
            _drop_reasoning(generations),
            options.prompt_only,
            make,
        )
        return await self._runner.stream_choices(generations, choices, caller, options.shown)

    async def _collect(
        self, caller: Caller, generations: list[GenerationRequest], form: Format, fields: GenerationFields
    ) -> Whole | None:
        options = detail_options(fields)
        make = None
        if options.any:
            naming = self._naming(fields)

            def make(choices: CollectedChoices) -> CollectedChoice:
                return DetailedCollectedChoice(choices, form, options, naming)

        choices = CollectedChoices(
            sum(generation.choices for generation in generations),
            client_names(fields, generations[0]).rename,
            _drop_reasoning(generations),
            options.prompt_only,
            make,
        )
        try:
            started = await self._runner.collect_choices(generations, choices, caller, options.shown)
            if started is None:
                return None
            results = choices.results()
            body = form.full_response(results, usage(choices.usage.counts()), _prompt_fields(form, choices))
        finally:
            choices.cancel()
        return Whole(body, started)

    def _naming(self, fields: GenerationFields) -> Naming:
        return self._runner.naming(fields.model, bool(fields.return_tokens_as_token_ids))


def _enter_hints(fields: GenerationFields, pipeline: Pipeline) -> None:
    """Adds the routing hints of the request's body to its context; those of its headers win."""
    outer = context.current()
    if fields.nvext is not None:
        context.enter(outer._replace(hints=outer.hints.over(fields.nvext.hints())))
    if fields.data_parallel_rank is None:
        return
    if pipeline.config.routing != "direct":
        raise invalid(
            "data_parallel_rank is supported only with routing direct; otherwise the router chooses the rank.",
            param="data_parallel_rank",
            code="unsupported_parameter",
        )
    outer = context.current()
    context.enter(outer._replace(hints=outer.hints.with_rank(fields.data_parallel_rank)))


def detail_options(fields: GenerationFields) -> DetailOptions:
    """Returns the details that a request selects."""
    echo = isinstance(fields, CompletionRequest) and bool(fields.echo)
    logprobs = _with_logprobs(fields)
    return DetailOptions(
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs is not None,
        token_ids=bool(fields.return_token_ids),
        continuous_usage=fields.continuous_usage,
        prompt_only=echo and fields.max_tokens == 0,
        echo=echo,
        echo_logprobs=echo and logprobs,
    )


def _with_logprobs(fields: GenerationFields) -> bool:
    """Returns whether log-probabilities are requested; in completions, 0 means that of the chosen token only."""
    if isinstance(fields, CompletionRequest):
        return fields.logprobs is not None
    return isinstance(fields, ChatCompletionRequest) and bool(fields.logprobs)


def _drop_reasoning(generations: list[GenerationRequest]) -> bool:
    return any(request.parsing is not None and request.parsing.drop_reasoning for request in generations)


def _prompt_fields(form: Format, choices: CollectedChoices) -> dict[str, Any]:
    """Returns the fields about the prompt in a chat completion."""
    first = choices.sinks[0] if choices.sinks else None
    return first.prompt_fields() if isinstance(first, DetailedCollectedChoice) and not form.prompt_in_choice else {}
