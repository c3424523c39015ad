"""The pipeline of a request, from its prompt to the start of generation.

    find model → tokenize → check length → admit → place (route, reserve) → start on worker and postprocess

Afterwards the stream manager forwards tokens to postprocess and text to the sinks, and releases the reservation at the
end. `builder` selects the stages by PipelineConfig. Failures are handled in one place each: unreachable workers in
`placement`, lost workers in `migration`, failed pairs in `disaggregation`, lost postprocess replicas in
`postprocess_pool`, failed calls in `ReplicaSet`, and exceeded deadlines in `deadlines`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid, quoted
from services.common.base.packing import unpack_u32
from services.common.observability import telemetry
from services.gateway.admission.scopes import Scope
from services.gateway.admission.tenants import SHARED
from services.gateway.backends.placement.interfaces import PlacementRequest
from services.gateway.backends.workers.capabilities import able, are_text_only, with_adapter
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from services.gateway.core import context
from services.gateway.core.generation import Generation
from services.gateway.core.receipts import Receipt
from services.gateway.core.request import (
    ChatPrompt,
    EmbedsPrompt,
    GenerationRequest,
    Route,
    SamplingParams,
    Sink,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
    no_effect,
)
from services.gateway.core.request_size import check_prompt_logprobs, held_by
from services.gateway.core.routing_hints import NO_HINTS
from services.gateway.pipeline import plugins, tenant_cache
from services.gateway.pipeline.builder import build_stages
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.engine_preprocessing import check_engine_capabilities
from services.gateway.pipeline.model_lifecycle import ModelLifecycle
from services.gateway.pipeline.stages import Components, Handler
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.running_memory import RunningShare
from services.gateway.streams.stream import GenerationStream

TEXT_SHARE = 0.5
NO_LIMIT = 1 << 30


def build_pipeline(config: PipelineConfig, components: Components) -> Pipeline:
    """Returns the pipeline of a configuration.

    Raises:
        SluiceError: FAILED_PRECONDITION for an invalid configuration.
    """
    try:
        config.check()
        if not config.handler:
            return Pipeline(config, components)
        handler = plugins.load_handler(config, components)
        return handler if isinstance(handler, Pipeline) else HandlerPipeline(config, components, handler)
    except ValueError as error:
        raise SluiceError(ErrorKind.FAILED_PRECONDITION, str(error)) from error


def named(request: GenerationRequest, registry: WorkerRegistry) -> GenerationRequest:
    """Returns the request with its model resolved: the name of a LoRA adapter becomes its base model plus the adapter.

    Raises:
        SluiceError: as `WorkerRegistry.model`; INVALID_ARGUMENT when the request names two adapters.
    """
    entry = registry.model(request.model)
    if entry.model == request.model:
        return request
    if request.lora not in ("", request.model):
        raise invalid(
            f"{quoted(request.model)} is a LoRA adapter itself; omit lora_path ({quoted(request.lora)}).",
            param="lora_path",
            code="invalid_value",
        )
    needs = (*request.needs, ("lora", "model"))
    return replace(request, model=entry.model, lora=request.model, needs=needs)


class StreamedGeneration(Generation):
    """The running choices of one prompt, as streams of workers."""

    def __init__(self, stream_manager: StreamManager, prompt: TokenizedPrompt) -> None:
        self._stream_manager = stream_manager
        self._prompt = prompt
        self.streams: list[GenerationStream] = []

    @property
    def choices(self) -> int:
        return len(self.streams)

    def tokens_of(self, choice: int) -> Sequence[int]:
        return self.streams[choice].tokens

    @property
    def degraded(self) -> set[str]:
        return {reason for stream in self.streams for reason in stream.degraded}

    @property
    def migrations(self) -> int:
        return sum(stream.migrations for stream in self.streams)

    @property
    def receipts(self) -> list[Receipt]:
        return [receipt for stream in self.streams if (receipt := stream.receipt) is not None]

    @property
    def cached_tokens(self) -> int:
        return max((stream.cached_tokens for stream in self.streams), default=0)

    @property
    def completion_tokens(self) -> int:
        return sum(stream.completion_tokens for stream in self.streams)

    @property
    def prompt(self) -> TokenizedPrompt:
        """The prompt; if the worker tokenizes it, with token ids once they are available."""
        return self.streams[0].prompt if self.streams else self._prompt

    @property
    def defaults(self) -> SamplingParams:
        return self.prompt.defaults

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.length

    @property
    def prompt_ids(self) -> array[int]:
        """Token ids of the prompt; if the worker tokenizes it, they are appended to this array later."""
        prompt_ids_by_worker = self.streams[0].prompt_ids if self.streams else None
        return unpack_u32(self.prompt.token_ids) if prompt_ids_by_worker is None else prompt_ids_by_worker

    @property
    def generated_tokens(self) -> int:
        return sum(max(stream.completion_tokens, len(stream.tokens)) for stream in self.streams)

    @property
    def reasoning_tokens(self) -> int:
        return sum(stream.reasoning_tokens for stream in self.streams)

    def cancel(self) -> None:
        for stream in self.streams:
            self._stream_manager.cancel(stream)


class Pipeline:
    """Runs requests for the models of one configuration.

    Args:
        config: the configuration.
        components: the components of this process.
        listeners: further objects to notify of models.

    Attributes:
        lifecycle: notifies the custom stages of models.
    """

    def __init__(self, config: PipelineConfig, components: Components, listeners: Sequence[object] = ()) -> None:
        self.config = config
        self.preprocess = components.preprocess
        self.registry = components.registry
        self.connections = components.connections
        self.stream_manager = components.stream_manager
        self._post_wait_s = components.post_wait_s
        self.stages = build_stages(config, components)
        self.lifecycle = ModelLifecycle(
            (self, *self.stages.custom, *listeners), components.registry, components.tasks, components.set_up_s
        )
        self._engine_text = config.postprocessing == "engine"

    async def run(self, request: GenerationRequest, sinks: Sequence[Sink]) -> Generation:
        """Starts a request as `start`, and has what a handler generated by itself charged to the caller."""
        generation = await self.start(request, sinks)
        if not isinstance(generation, Generation):
            raise internal(
                f"The handler {type(self).__name__} of this gateway returned no Generation; see docs/pipeline.md."
            )
        if not isinstance(generation, StreamedGeneration):
            context.current().permit.watch(generation)
        return generation

    async def start(self, request: GenerationRequest, sinks: Sequence[Sink]) -> Generation:
        """Starts every choice of a request; `sinks[i]` receives the output of choice i.

        Raises:
            SluiceError: a choice could not be started; all others are cancelled then.
        """
        if self.config.routing == "query-only":
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "This gateway does not run requests (routing query-only): use /v1/chat/completions or /v1/completions, "
                "which return the worker that would be chosen.",
                code="query_only",
            )
        permit = context.current().permit
        choices, memory = request.choices, None
        self.stream_manager.expect(choices)
        try:
            request, entry, prompt = await self._prepare(request)
            max_tokens = _max_tokens(request, prompt, entry)
            check_prompt_logprobs(request, prompt.estimated_length)
            await permit.charge(prompt.estimated_length + choices * (request.stop.max_tokens or 0))
            memory = self.stream_manager.memory.take(permit.owner, held_by(request, prompt))
            return await self._place_choices(request, entry, prompt, max_tokens, sinks, memory)
        finally:
            if memory is not None:
                memory.release()
            self.stream_manager.settle(choices)

    async def _place_choices(
        self,
        request: GenerationRequest,
        entry: WorkerEntry,
        prompt: TokenizedPrompt,
        max_tokens: int,
        sinks: Sequence[Sink],
        memory: RunningShare,
    ) -> Generation:
        request_context = context.current()
        permit = request_context.permit
        generation = StreamedGeneration(self.stream_manager, prompt)
        dead = map(no_effect, request.fields_without_effect(prompt.without_effect))
        reasons = (*request.degraded, *dead, *prompt.notes)
        permit.watch(generation)
        try:
            if self.config.replicas_make_text:
                await self.connections.text_ready(request_context.deadline.share(TEXT_SHARE, self._post_wait_s))
            for index, sink in enumerate(sinks):
                placement = await self.stages.placement.place(
                    self._placement_request(request, index, prompt, entry, max_tokens)
                )
                stream = self.stream_manager.connect(
                    request,
                    index,
                    prompt,
                    placement,
                    max_tokens,
                    sink,
                    request_context,
                    self.stages.recovery,
                    self.stages.text,
                    memory,
                )
                generation.streams.append(stream)
                for reason in reasons:
                    self.stream_manager.degrade(stream, reason)
                if tenant_cache.is_shared(request, permit):
                    self.stream_manager.degrade(stream, SHARED)
        except BaseException:
            generation.cancel()
            raise
        return generation

    def only_asks(self) -> bool:
        """Returns whether the current request only queries the workers that would run it."""
        return self.config.routing == "query-only" or context.current().hints.query_only

    async def query(self, request: GenerationRequest) -> tuple[TokenizedPrompt, Route]:
        """Returns the prompt and the route that `start` would use, without running or reserving anything.

        Raises:
            SluiceError: as `start`; PERMISSION_DENIED without the scope pin-worker, because the result names workers;
                FAILED_PRECONDITION where only a worker can tokenize the prompt.
        """
        context.current().permit.require(Scope.PIN_WORKER, subject="A request for the worker that would run it")
        if self.config.preprocessing == "engine":
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "Query-only requests need token ids, but on this gateway the engine tokenizes prompts (preprocessing "
                "engine).",
                code="query_only",
            )
        request, entry, prompt = await self._prepare(request)
        wanted = self._placement_request(request, 0, prompt, entry, _max_tokens(request, prompt, entry))
        return prompt, await self.stages.router_selector.ask(wanted)

    async def _prepare(self, request: GenerationRequest) -> tuple[GenerationRequest, WorkerEntry, TokenizedPrompt]:
        """Returns the completed request, one of the workers that can run it, and the tokenized prompt."""
        request_context = context.current()
        hints = request_context.hints
        request = named(request, self.registry)
        able_workers = with_adapter(able(self.registry.of_model(request.model), request.needs), request.lora)
        request, workers = tenant_cache.with_tenant_salt(request, able_workers, request_context.permit)
        entry = workers[0]
        await self.lifecycle.ready(entry.model)
        if self._engine_text or request_context.session_id or hints is not NO_HINTS:
            request = replace(
                request,
                hints=hints,
                engine_text=self._engine_text,
                text_only=self._engine_text and are_text_only(workers),
                session_id=request_context.session_id,
            )
        # Token ids of an earlier query do not say which files their placeholders stand for: tokenize such chats again.
        if hints.token_ids is not None and not (isinstance(request.prompt, ChatPrompt) and request.prompt.media):
            request = replace(request, prompt=TokenPrompt(hints.token_ids))
        with telemetry.stage("gateway.tokenize"):
            prompt = await self.stages.tokenizing.tokenize(request, entry)
        check_engine_capabilities(workers, prompt, self._engine_text)
        sampling = request.sampling.or_else(prompt.defaults)
        if sampling is not request.sampling:
            request = replace(request, sampling=sampling)
        return request, entry, prompt

    def _placement_request(
        self, request: GenerationRequest, index: int, prompt: TokenizedPrompt, entry: WorkerEntry, max_tokens: int
    ) -> PlacementRequest:
        return PlacementRequest(
            request=request,
            reservation=f"{request.request_id}-{index}",
            prompt=prompt,
            block_size=entry.block_size,
            output_tokens=max_tokens if request.stop.max_tokens else 0,
            deadline=context.current().deadline,
            disaggregation=self.stages.disaggregation,
        )

    async def prompt_text(self, request: GenerationRequest) -> str:
        """Returns the prompt of a completion as text, for clients that request an echo."""
        if isinstance(request.prompt, TextPrompt):
            return request.prompt.text
        assert isinstance(request.prompt, TokenPrompt)
        return await self.preprocess.detokenize(request.model, request.prompt.token_ids)


class HandlerPipeline(Pipeline):
    """A pipeline whose requests a handler starts that is not derived from Pipeline."""

    def __init__(self, config: PipelineConfig, components: Components, handler: Handler) -> None:
        super().__init__(config, components, (handler,))
        self._handler = handler

    async def start(self, request: GenerationRequest, sinks: Sequence[Sink]) -> Generation:
        request = named(request, self.registry)
        await self.lifecycle.ready(request.model)
        return await self._handler.start(request, sinks)


_PROMPT_FIELDS = {ChatPrompt: "messages", EmbedsPrompt: "prompt_embeds"}


def _max_tokens(request: GenerationRequest, prompt: TokenizedPrompt, entry: WorkerEntry) -> int:
    """Returns how many tokens may be generated.

    Raises:
        SluiceError: INVALID_ARGUMENT when prompt and `max_tokens` exceed the context length, or the prompt is empty.
    """
    field = _PROMPT_FIELDS.get(type(request.prompt), "prompt")
    if prompt.raw is not None:  # the worker checks the length of the prompt
        if entry.context_length and (request.stop.max_tokens or 0) >= entry.context_length:
            raise invalid(
                f"max_tokens is {request.stop.max_tokens}, but the context length of {request.model} is "
                f"{entry.context_length} tokens for prompt and output together; reduce max_tokens.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return request.stop.max_tokens or entry.context_length or NO_LIMIT
    if prompt.length == 0:
        raise invalid("The prompt is empty; send at least one token.", param=field, code="empty_prompt")
    limit = prompt.context_limit(entry.context_length)
    requested = request.stop.max_tokens
    if not limit:
        requested = requested or prompt.default_max_tokens
        if requested is None:
            raise invalid("The context length of this model is unknown; set max_tokens.", param="max_tokens")
        return requested
    if prompt.length >= limit:
        raise invalid(
            f"The prompt has {prompt.length} tokens, but the context length of {request.model} is {limit} tokens for "
            "prompt and output together; shorten the prompt.",
            param=field,
            code="context_length_exceeded",
        )
    available = limit - prompt.length
    if requested is not None and requested > available:
        raise invalid(
            f"max_tokens is {requested}, but after the prompt's {prompt.length} tokens only {available} of the "
            f"{limit} tokens of the context remain; reduce max_tokens or shorten the prompt.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return min(available, prompt.default_max_tokens or available) if requested is None else requested
