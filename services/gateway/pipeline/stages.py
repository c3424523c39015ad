"""The interfaces that custom stages implement, and the components available to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from services.common.base.tasks import TaskOwner
from services.gateway.backends.placement.interfaces import WorkerRouter
from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from services.gateway.core.generation import Generation
from services.gateway.core.request import FinishReason, GenerationRequest, Reservations, Sink, TokenizedPrompt
from services.gateway.metrics import GatewayMetrics
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.migration_policy import MigrationPolicy


@dataclass(frozen=True)
class Components:
    """Components of a gateway process, shared by all pipelines.

    Attributes:
        router: queries the router service; a `route` stage may ask it, with workers of its choice.
        reservations: receives the outcomes of reservations whose route does not name another.
        registry: the registered workers.
        connections: connections to workers and postprocess replicas.
        stream_manager: the generations in progress.
        tasks: owner of background tasks.
        migration: limits of migration.
        post_wait_s: how long a stream waits for a postprocess replica.
        set_up_s: how long a request waits until custom stages are set up for its model.
    """

    preprocess: PreprocessClient
    router: WorkerRouter
    reservations: Reservations
    registry: WorkerRegistry
    connections: ConnectionManager
    stream_manager: StreamManager
    metrics: GatewayMetrics
    tasks: TaskOwner
    migration: MigrationPolicy
    post_wait_s: float
    set_up_s: float = 15.0


@runtime_checkable
class TokenizeStage(Protocol):
    """Tokenizes prompts. Constructed as `Class(components)`."""

    async def tokenize(self, request: GenerationRequest, worker: WorkerEntry) -> TokenizedPrompt:
        """Returns the tokenized prompt of a request.

        Args:
            worker: one of the workers that can run it; its `block_size` is the block size of the hashes.

        Raises:
            SluiceError: returned to the client.
        """


@runtime_checkable
class Handler(Protocol):
    """Runs requests in place of the pipeline. Constructed as `Class(config, components)`.

    A class derived from Pipeline changes requests before the pipeline runs them; any other answers by itself.
    """

    async def start(self, request: GenerationRequest, sinks: Sequence[Sink]) -> Generation:
        """Starts every choice of a request; `sinks[i]` receives the output of choice i, and exactly one end.

        Returns:
            The usage, also while the choices run; `AnsweredGeneration` where the handler counts itself.

        Raises:
            SluiceError: returned to the client; no sink is called then.
        """


class TextDelta(NamedTuple):
    """The next text of a choice; `stopped` ends the choice and stops the engine."""

    text: str = ""
    reasoning: str = ""
    stopped: bool = False


class CustomStream(Protocol):
    """Produces the text of one choice. Called on the event loop for each batch of tokens; must not block."""

    def feed(self, token_ids: Sequence[int]) -> TextDelta:
        """Returns the text of the next tokens."""

    def end(self, reason: FinishReason, stop_token_id: int | None) -> TextDelta:
        """Returns the remaining text, after the engine has finished."""


@runtime_checkable
class PostprocessStage(Protocol):
    """Turns tokens into text. Constructed as `Class(components)`."""

    def open(self, request: GenerationRequest, prompt: TokenizedPrompt) -> CustomStream:
        """Opens the stream of one choice. Called again for the same choice when its text is replayed."""
