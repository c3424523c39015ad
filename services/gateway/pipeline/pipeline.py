"""The life of a request, from the prompt to the moment its tokens flow.

    model known? → admission → tokenize → does it fit? → place (route, reserve) → start on worker and postprocess

From there on the switchboard carries tokens to text to the sinks, and gives the reservation back at the end. Who does
each step is put together in `assembling`, after PipelineConfig. What fails on the way has one place where it is dealt
with: a worker that cannot be reached in `placement`, one that is lost later in `migration`, a pair of workers in
`disaggregation`, a postprocess replica in `text_replicas`, a call that is not answered in `ReplicaSet`, and time that
is up in `deadlines`.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from services.common.errors import ErrorKind, SluiceError, invalid, quoted
from services.common.observability import telemetry
from services.common.packing import unpack_u32
from services.gateway.admission import permit as permits
from services.gateway.admission.scopes import Scope
from services.gateway.admission.tenants import SHARED
from services.gateway.core import deadlines
from services.gateway.core import routing_hints as hints
from services.gateway.core.request import (
    ChatPrompt,
    EmbedsPrompt,
    GenerationRequest,
    Route,
    Sink,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
)
from services.gateway.pipeline import plugins as plugins
from services.gateway.pipeline import session_affinity as sessions
from services.gateway.pipeline import tenant_cache
from services.gateway.pipeline.builder import assembled
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.engine_preprocessing import check_able
from services.gateway.pipeline.stages import Components
from services.gateway.placement.selector import PlacementRequest
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.stream import GenerationStream
from services.gateway.workers.capabilities import able, holding
from services.gateway.workers.registry import WorkerEntry, WorkerRegistry

TEXT_SHARE = 0.5
UNBOUNDED = 1 << 30


def build_pipeline(config: PipelineConfig, components: Components) -> Pipeline:
    """The pipeline that a configuration describes.

    Raises:
        SluiceError: FAILED_PRECONDITION with a sentence that says what to change.
    """
    try:
        config.check()
        return plugins.own_handler(config, components, Pipeline) if config.handler else Pipeline(config, components)
    except ValueError as error:
        raise SluiceError(ErrorKind.FAILED_PRECONDITION, str(error)) from error


def named(request: GenerationRequest, registry: WorkerRegistry) -> GenerationRequest:
    """Returns the request by the model that runs it: a LoRA adapter's name stands for its model with that adapter.

    Raises:
        SluiceError: as `WorkerRegistry.model`, INVALID_ARGUMENT when it names two adapters.
    """
    entry = registry.model(request.model)
    if entry.model == request.model:
        return request
    if request.lora not in ("", request.model):
        raise invalid(
            f"{quoted(request.model)} is a LoRA adapter itself, so lora_path cannot name {quoted(request.lora)}.",
            param="lora_path",
            code="invalid_value",
        )
    needs = (*request.needs, ("lora", "model"))
    return replace(request, model=entry.model, lora=request.model, needs=needs)


class Generation:
    """One prompt's choices under way."""

    def __init__(self, stream_manager: StreamManager, prompt: TokenizedPrompt) -> None:
        self._stream_manager = stream_manager
        self._prompt = prompt
        self.streams: list[GenerationStream] = []

    @property
    def degraded(self) -> set[str]:
        """Fallbacks taken so far."""
        return {reason for stream in self.streams for reason in stream.degraded}

    @property
    def migrations(self) -> int:
        """How often a choice has moved to another worker so far."""
        return sum(stream.migrations for stream in self.streams)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a cache; of several choices, the best."""
        return max((stream.cached_tokens for stream in self.streams), default=0)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, over all choices."""
        return sum(stream.completion_tokens for stream in self.streams)

    @property
    def prompt(self) -> TokenizedPrompt:
        """What was generated from; of a prompt that the worker makes, its ids once they are known."""
        return self.streams[0].prompt if self.streams else self._prompt

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.prompt.length

    @property
    def prompt_ids(self) -> array[int]:
        """Of the prompt; when the worker makes them, they come into this array later."""
        learnt = self.streams[0].prompt_ids if self.streams else None
        return unpack_u32(self.prompt.token_ids) if learnt is None else learnt

    @property
    def generated_tokens(self) -> int:
        """The same, also of choices that were given up."""
        return sum(max(stream.completion_tokens, len(stream.tokens)) for stream in self.streams)

    @property
    def reasoning_tokens(self) -> int:
        """Of them, those inside the model's thinking."""
        return sum(stream.reasoning_tokens for stream in self.streams)

    def cancel(self) -> None:
        """Stops whatever still runs; the sinks hear nothing more."""
        for stream in self.streams:
            self._stream_manager.cancel(stream)


class Pipeline:
    """Conducts preprocess, router, workers and postprocess, for the models of one configuration.

    Args:
        config: what is done where.
        components: the parts of this process.

    Attributes:
        model_ready: returns when the stages are set up for a model; raises SluiceError when they cannot be.
    """

    def __init__(self, config: PipelineConfig, components: Components) -> None:
        self.config = config
        self.preprocess = components.preprocess
        self.router = components.router
        self.registry = components.registry
        self.connections = components.connections
        self.stream_manager = components.stream_manager
        self._post_wait_s = components.post_wait_s
        stages = assembled(config, components)
        self.stages = stages
        self.tokenizing = stages.tokenizing
        self.placement = stages.placement
        self.model_ready: Callable[[str], Awaitable[None]] = _at_once
        self._router_asking = stages.router_asking
        self._engine_text = config.postprocessing == "engine"
        self._text_replicas = config.replicas_make_text

    async def start(self, request: GenerationRequest, sinks: Sequence[Sink]) -> Generation:
        """Starts every choice of a request; `sinks[i]` hears choice i.

        Raises:
            SluiceError: before anything runs; nothing is left behind then.
        """
        if self.config.routing == "query-only":
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "This gateway runs nothing (routing query-only): /v1/chat/completions and /v1/completions answer which "
                "worker would be chosen.",
                code="query_only",
            )
        with self.stream_manager.expecting(request.choices):
            return await self._started(request, sinks)

    async def _started(self, request: GenerationRequest, sinks: Sequence[Sink]) -> Generation:
        deadline = deadlines.current()
        request, entry, prompt = await self._prepared(request)
        max_tokens = _fit(request, prompt, entry)
        permit = permits.current()
        await permit.charge(prompt.estimated_length + request.choices * (request.stop.max_tokens or 0))
        generation = Generation(self.stream_manager, prompt)
        permit.watch(generation)
        try:
            if self._text_replicas:
                await self.connections.text_ready(deadline.share(TEXT_SHARE, self._post_wait_s))
            for index, sink in enumerate(sinks):
                placed = await self.placement.place(self._wanted(request, index, prompt, entry, max_tokens))
                stream = self.stream_manager.connect(
                    request,
                    index,
                    prompt,
                    placed.route,
                    placed.worker,
                    max_tokens,
                    sink,
                    deadline,
                    placed.prefill,
                )
                generation.streams.append(stream)
                if tenant_cache.is_shared(request, permit):
                    self.stream_manager.on_degraded(stream, SHARED)
        except BaseException:
            generation.cancel()
            raise
        return generation

    def only_asks(self) -> bool:
        """Whether the request at hand is answered with who would run it."""
        return self.config.routing == "query-only" or hints.current().query_only

    async def query(self, request: GenerationRequest) -> tuple[TokenizedPrompt, Route]:
        """What `start` would run, and where; runs and books nothing.

        Raises:
            SluiceError: as `start`, PERMISSION_DENIED without the scope pin-worker, for the answer names workers,
                FAILED_PRECONDITION where only a worker could make the prompt's ids.
        """
        permits.current().require(Scope.PIN_WORKER, subject="A request for the worker that would run it")
        if self.config.preprocessing == "engine":
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "This gateway leaves prompts to the engine (preprocessing engine) and knows no ids to answer.",
                code="query_only",
            )
        request, entry, prompt = await self._prepared(request)
        wanted = self._wanted(request, 0, prompt, entry, _fit(request, prompt, entry))
        return prompt, await self._router_asking.ask(wanted)

    async def _prepared(self, request: GenerationRequest) -> tuple[GenerationRequest, WorkerEntry, TokenizedPrompt]:
        """The request as it runs, one of the workers that can run it, and the prompt's ids."""
        said = hints.current()
        request = named(request, self.registry)
        able_workers = holding(able(self.registry.of_model(request.model), request.needs), request.lora)
        request, workers = tenant_cache.separated(request, able_workers, permits.current())
        entry = workers[0]
        await self.model_ready(entry.model)
        request = replace(request, hints=said, engine_text=self._engine_text, session_id=sessions.current())
        if said.token_ids is not None:
            request = replace(request, prompt=TokenPrompt(said.token_ids))
        with telemetry.stage("gateway.tokenize"):
            prompt = await self.tokenizing.tokenize(request, entry)
        check_able(workers, prompt, self._engine_text)
        return replace(request, sampling=request.sampling.or_else(prompt.defaults)), entry, prompt

    def _wanted(
        self, request: GenerationRequest, index: int, prompt: TokenizedPrompt, entry: WorkerEntry, max_tokens: int
    ) -> PlacementRequest:
        return PlacementRequest(
            request=request,
            reservation=f"{request.request_id}-{index}",
            prompt=prompt,
            block_size=entry.block_size,
            output_tokens=max_tokens if request.stop.max_tokens else 0,
            deadline=deadlines.current(),
        )

    async def prompt_text(self, request: GenerationRequest) -> str:
        """The prompt of a completion as text, for clients that want it echoed."""
        if isinstance(request.prompt, TextPrompt):
            return request.prompt.text
        assert isinstance(request.prompt, TokenPrompt)
        return await self.preprocess.detokenize(request.model, request.prompt.token_ids)


async def _at_once(model: str) -> None:
    return None


_PROMPT_FIELDS = {ChatPrompt: "messages", EmbedsPrompt: "prompt_embeds"}


def _fit(request: GenerationRequest, prompt: TokenizedPrompt, entry: WorkerEntry) -> int:
    """How many tokens may be generated; SluiceError(INVALID_ARGUMENT) when the prompt leaves no room."""
    field = _PROMPT_FIELDS.get(type(request.prompt), "prompt")
    if prompt.raw is not None:  # the worker checks the rest
        if entry.context_length and (request.stop.max_tokens or 0) >= entry.context_length:
            raise invalid(
                f"max_tokens is {request.stop.max_tokens}, but the context of {request.model} holds "
                f"{entry.context_length}, prompt and answer together.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return request.stop.max_tokens or entry.context_length or UNBOUNDED
    if prompt.length == 0:
        raise invalid("The prompt is empty.", param=field, code="empty_prompt")
    limits = [limit for limit in (entry.context_length, prompt.context_length) if limit]
    context = min(limits, default=0)
    wanted = request.stop.max_tokens
    if not context:
        wanted = wanted or prompt.default_max_tokens
        if wanted is None:
            raise invalid("The context length of this model is unknown; set max_tokens.", param="max_tokens")
        return wanted
    if prompt.length >= context:
        raise invalid(
            f"The prompt has {prompt.length} tokens, but the context of {request.model} holds {context}, "
            "prompt and answer together; shorten the prompt.",
            param=field,
            code="context_length_exceeded",
        )
    room = context - prompt.length
    if wanted is not None and wanted > room:
        raise invalid(
            f"max_tokens is {wanted}, but after the prompt's {prompt.length} tokens only {room} of the context's "
            f"{context} are left.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return min(room, prompt.default_max_tokens or room) if wanted is None else wanted
