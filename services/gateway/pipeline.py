"""The life of a request, from the prompt to the moment its tokens flow.

    model known? → admission → tokenize → does it fit? → place (route, reserve) → start on worker and postprocess

From there on the switchboard carries tokens to text to the sinks, and gives the reservation back at the end. What
fails on the way has one place where it is dealt with: a worker that cannot be reached in `placement`, one that is lost
later in `migration`, a postprocess replica in `text_replicas`, a call that is not answered in `ReplicaSet`, and time
that is up in `deadlines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.common import telemetry
from services.common.errors import invalid
from services.gateway import deadlines
from services.gateway.capabilities import able
from services.gateway.clients.catalogue import Catalogue, WorkerEntry
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.clients.router import RouterClient
from services.gateway.fleet import Fleet
from services.gateway.generation import ChatPrompt, GenerationRequest, Sink, TextPrompt, Tokenized, TokenPrompt
from services.gateway.live_stream import LiveStream
from services.gateway.placement import Placement, Wanted
from services.gateway.switchboard import POST_WAIT_S, Switchboard

TEXT_SHARE = 0.5


class Generation:
    """One prompt's choices under way."""

    def __init__(self, switchboard: Switchboard, prompt: Tokenized) -> None:
        self._switchboard = switchboard
        self.prompt_tokens = prompt.length
        self.prompt = prompt
        self.streams: list[LiveStream] = []

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
        placement: Placement,
        post_wait_s: float = POST_WAIT_S,
    ) -> None:
        self.preprocess = preprocess
        self.router = router
        self.catalogue = catalogue
        self.fleet = fleet
        self.switchboard = switchboard
        self.placement = placement
        self._post_wait_s = post_wait_s

    async def start(self, request: GenerationRequest, sinks: Sequence[Sink]) -> Generation:
        """Starts every choice of a request; `sinks[i]` hears choice i.

        Raises:
            SluiceError: before anything runs; nothing is left behind then.
        """
        self.catalogue.model(request.model)
        entry = able(self.catalogue.of_model(request.model), request.needs)[0]
        self.switchboard.admit(request.choices)
        deadline = deadlines.current()
        with telemetry.stage("gateway.tokenize"):
            prompt = await self.preprocess.tokenize(
                request.model, request.prompt, entry.block_size, request.lora, request.cache_salt
            )
        request = replace(request, sampling=request.sampling.or_else(prompt.defaults))
        max_tokens = _fit(request, prompt, entry)
        generation = Generation(self.switchboard, prompt)
        try:
            await self.fleet.text_ready(deadline.share(TEXT_SHARE, self._post_wait_s))
            for index, sink in enumerate(sinks):
                route, worker = await self.placement.place(
                    Wanted(
                        request=request,
                        booking=f"{request.request_id}-{index}",
                        prompt=prompt,
                        block_size=entry.block_size,
                        output_tokens=max_tokens if request.stop.max_tokens else 0,
                        deadline=deadline,
                    )
                )
                generation.streams.append(
                    self.switchboard.connect(request, index, prompt, route, worker, max_tokens, sink, deadline)
                )
        except BaseException:
            generation.cancel()
            raise
        return generation

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
