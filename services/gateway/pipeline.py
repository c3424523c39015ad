"""The life of a request, from the prompt to the moment its tokens flow.

    model known? → admission → tokenize → does it fit? → route and reserve → start on worker and postprocess

From there on the switchboard carries tokens to text to the sinks, and gives the reservation back at the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from services.common import telemetry
from services.common.errors import ErrorKind, SluiceError, invalid, unavailable
from services.gateway.capabilities import able
from services.gateway.clients.catalogue import Catalogue, WorkerEntry
from services.gateway.clients.post_link import PostLink
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.clients.router import RouterClient
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.fleet import Fleet
from services.gateway.generation import ChatPrompt, GenerationRequest, Route, Sink, TextPrompt, Tokenized, TokenPrompt
from services.gateway.metrics import GatewayMetrics
from services.gateway.switchboard import LiveStream, Switchboard

log = logging.getLogger(__name__)

PLACEMENT_ATTEMPTS = 3
ROUTER_LAG_S = 1.5
ROUTER_RETRY_S = 0.1


class Generation:
    """One prompt's choices under way."""

    def __init__(self, switchboard: Switchboard, prompt: Tokenized) -> None:
        self._switchboard = switchboard
        self.prompt_tokens = prompt.length
        self.prompt = prompt
        self.streams: list[LiveStream] = []
        self.degraded: set[str] = set()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a cache; of several choices, the best."""
        return max((stream.cached_tokens for stream in self.streams), default=0)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, over all choices."""
        return sum(stream.completion_tokens for stream in self.streams)

    @property
    def reasoning_tokens(self) -> int:
        """Of them, those inside the model's thinking."""
        return sum(stream.reasoning_tokens for stream in self.streams)

    def cancel(self) -> None:
        """Stops whatever still runs; the sinks hear nothing more."""
        for stream in self.streams:
            self._switchboard.cancel(stream)


class Pipeline:
    """Conducts preprocess, router, workers and postprocess."""

    def __init__(
        self,
        preprocess: PreprocessClient,
        router: RouterClient,
        catalogue: Catalogue,
        fleet: Fleet,
        switchboard: Switchboard,
        metrics: GatewayMetrics,
    ) -> None:
        self.preprocess = preprocess
        self.router = router
        self.catalogue = catalogue
        self.fleet = fleet
        self.switchboard = switchboard
        self.metrics = metrics

    async def start(self, request: GenerationRequest, sinks: Sequence[Sink]) -> Generation:
        """Starts every choice of a request; `sinks[i]` hears choice i.

        Raises:
            SluiceError: before anything runs; nothing is left behind then.
        """
        self.catalogue.model(request.model)
        entry = able(self.catalogue.of_model(request.model), request.needs)[0]
        self.switchboard.admit(request.choices)
        with telemetry.stage("gateway.tokenize"):
            prompt = await self.preprocess.tokenize(
                request.model, request.prompt, entry.block_size, request.lora, request.cache_salt
            )
        request = replace(request, sampling=request.sampling.or_else(prompt.defaults))
        max_tokens = _fit(request, prompt, entry)
        generation = Generation(self.switchboard, prompt)
        try:
            for index, sink in enumerate(sinks):
                route, worker, post = await self._place(request, index, prompt, max_tokens, entry)
                if route.degraded:
                    generation.degraded.add(route.degraded)
                    self.metrics.degraded(route.degraded)
                generation.streams.append(
                    self.switchboard.connect(request, index, prompt, route, worker, post, max_tokens, sink)
                )
        except BaseException:
            generation.cancel()
            raise
        return generation

    async def _place(
        self, request: GenerationRequest, index: int, prompt: Tokenized, max_tokens: int, entry: WorkerEntry
    ) -> tuple[Route, WorkerLink, PostLink]:
        """A worker with a connection and a booking; workers that cannot be reached are left out the next time."""
        post = self.fleet.post()
        unreachable: set[str] = set()
        while True:
            route = await self._route(request, f"{request.request_id}-{index}", prompt, max_tokens, entry, unreachable)
            try:
                worker = self.fleet.worker(route.worker_id)
                await worker.ready()
                return route, worker, post
            except BaseException as error:
                if route.reservation_id:
                    self.router.free(route.reservation_id)
                unreachable.add(route.worker_id)
                if not isinstance(error, SluiceError) or len(unreachable) >= PLACEMENT_ATTEMPTS:
                    raise
                log.warning("%s Trying another worker.", error.message)

    async def _route(
        self,
        request: GenerationRequest,
        request_id: str,
        prompt: Tokenized,
        max_tokens: int,
        entry: WorkerEntry,
        unreachable: set[str],
    ) -> Route:
        candidates = self._candidates(request, unreachable)
        if unreachable:
            if not candidates:
                raise unavailable(f"No worker of model {request.model!r} can be reached.", code="no_workers")
            request_id = f"{request_id}-{len(unreachable)}"
        try:
            with telemetry.stage("gateway.route"):
                return await self._ask_router(request, request_id, prompt, max_tokens, entry, candidates)
        except SluiceError as error:
            if error.code == "no_workers" or error.kind not in (ErrorKind.UNAVAILABLE, ErrorKind.DEADLINE_EXCEEDED):
                raise
            return self._route_without_router(request, unreachable, error)

    def _candidates(self, request: GenerationRequest, unreachable: set[str]) -> list[str] | None:
        """Ids of the workers that can run a request; None when all of its model can."""
        workers = self.catalogue.of_model(request.model)
        left = [worker for worker in workers if worker.worker_id not in unreachable]
        if request.needs and left:
            left = able(left, request.needs)
        return None if len(left) == len(workers) else [worker.worker_id for worker in left]

    async def _ask_router(
        self,
        request: GenerationRequest,
        request_id: str,
        prompt: Tokenized,
        max_tokens: int,
        entry: WorkerEntry,
        candidates: list[str] | None,
    ) -> Route:
        """The router's choice. A replica that has not heard yet of workers another one announced gets a moment."""
        deadline = asyncio.get_running_loop().time() + ROUTER_LAG_S
        while True:
            try:
                return await self.router.route(
                    request_id,
                    request.model,
                    prompt,
                    entry.block_size,
                    expected_output_tokens=max_tokens if request.stop.max_tokens else 0,
                    lora=request.lora,
                    cache_salt=request.cache_salt,
                    priority=request.priority,
                    candidates=candidates,
                )
            except SluiceError as error:
                behind = error.code in ("no_workers", "model_not_found") and self.catalogue.of_model(request.model)
                if not behind or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(ROUTER_RETRY_S)

    def _route_without_router(self, request: GenerationRequest, unreachable: set[str], cause: SluiceError) -> Route:
        """No router answers: the worker last seen that has least to do."""
        candidates = self._candidates(request, unreachable)
        if candidates is None:
            candidates = [worker.worker_id for worker in self.catalogue.of_model(request.model)]
        link = self.fleet.least_busy(candidates)
        if link is None:
            raise cause
        return Route(worker_id=link.worker_id, degraded="router_unavailable")

    async def prompt_text(self, request: GenerationRequest) -> str:
        """The prompt of a completion as text, for clients that want it echoed."""
        if isinstance(request.prompt, TextPrompt):
            return request.prompt.text
        assert isinstance(request.prompt, TokenPrompt)
        return await self.preprocess.detokenize(request.model, request.prompt.token_ids)


def _fit(request: GenerationRequest, prompt: Tokenized, entry: WorkerEntry) -> int:
    """How many tokens may be generated; SluiceError(INVALID_ARGUMENT) when the prompt leaves no room."""
    field = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
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
