"""An example class for each stage of the gateway's pipeline, such as `sluice up --stage route=own_stages:Sticky`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from hashlib import sha256

from sluice.stages import (
    Components,
    FinishReason,
    Generation,
    GenerationRequest,
    Pipeline,
    PipelineConfig,
    Placement,
    PlacementRequest,
    Route,
    Sink,
    TextDelta,
    TextPrompt,
    TokenizedPrompt,
    WorkerEntry,
    invalid,
    unavailable,
    unpack_u32,
)


class Tidy:
    """Stage `tokenize`: strips surrounding spaces from completion prompts before preprocess tokenizes them."""

    def __init__(self, components: Components) -> None:
        self._preprocess = components.preprocess

    async def tokenize(self, request: GenerationRequest, worker: WorkerEntry) -> TokenizedPrompt:
        prompt = request.prompt
        if isinstance(prompt, TextPrompt):
            prompt = replace(prompt, text=prompt.text.strip())
        return await self._preprocess.tokenize(
            request.model, prompt, worker.block_size, request.lora, request.cache_salt
        )


class Sticky:
    """Stage `route`: routes each cache salt to the same worker, as long as the set of workers does not change."""

    def __init__(self, components: Components) -> None:
        pass

    async def route(self, wanted: PlacementRequest, workers: Sequence[WorkerEntry]) -> Route:
        worker_ids = sorted(worker.worker_id for worker in workers if worker.runs_alone)
        if not worker_ids:
            raise unavailable("No worker can run requests alone; start an aggregated one.", code="no_workers")
        digest = sha256(wanted.request.cache_salt.encode()).digest()
        return Route(worker_ids[digest[0] % len(worker_ids)])


class FirstConnected:
    """Stage `place`: selects the first connected worker of the list."""

    def __init__(self, components: Components) -> None:
        self._registry = components.registry
        self._connections = components.connections

    async def place(self, wanted: PlacementRequest, excluded: Collection[str] = ()) -> Placement:
        for entry in self._registry.of_model(wanted.request.model):
            link = self._connections.find(entry.worker_id)
            if entry.worker_id not in excluded and link is not None and link.connected:
                return Placement(Route(entry.worker_id), link)
        raise unavailable("No worker is connected; retry later.", code="no_workers")


class TokenNumbers:
    """Stage `postprocess`: returns token ids as text, and stops after `most`."""

    most = 5

    def __init__(self, components: Components) -> None:
        pass

    def open(self, request: GenerationRequest, prompt: TokenizedPrompt) -> Numbers:
        return Numbers(self.most, len(unpack_u32(prompt.token_ids)))


class Numbers:
    """Holds the text state of one choice."""

    def __init__(self, most: int, prompt_tokens: int) -> None:
        self._left = most
        self._head = f"({prompt_tokens})"

    def feed(self, token_ids: Sequence[int]) -> TextDelta:
        taken = token_ids[: self._left]
        self._left -= len(taken)
        head, self._head = self._head, ""
        return TextDelta(text=head + "".join(f" {token}" for token in taken), stopped=not self._left)

    def end(self, reason: FinishReason, stop_token_id: int | None) -> TextDelta:
        return TextDelta()


class Moderated(Pipeline):
    """Handler: replaces the pipeline, rejects prompts with the word "secret", and limits the output length."""

    most_tokens = 8

    def __init__(self, config: PipelineConfig, components: Components) -> None:
        super().__init__(config, components)
        self.refused = 0

    async def start(self, request: GenerationRequest, sinks: Sequence[Sink]) -> Generation:
        if isinstance(request.prompt, TextPrompt) and "secret" in request.prompt.text:
            self.refused += 1
            raise invalid("The prompt must not ask for secrets; rephrase it.", param="prompt", code="refused")
        most = min(request.stop.max_tokens or self.most_tokens, self.most_tokens)
        return await super().start(replace(request, stop=replace(request.stop, max_tokens=most)), sinks)
