"""The interfaces that custom stages implement, and the components available to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from services.common.tasks import TaskOwner
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.clients.router import RouterClient
from services.gateway.core.request import Finish, FinishReason, GenerationRequest, Role, Route, Sink, TokenizedPrompt
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement.selector import Placement, PlacementRequest, PlaceStage
from services.gateway.streams.manager import StreamManager
from services.gateway.streams.migration import MigrationPolicy
from services.gateway.workers.connections import ConnectionManager
from services.gateway.workers.registry import WorkerEntry, WorkerRegistry

__all__ = [
    "Components",
    "CustomStream",
    "Finish",
    "FinishReason",
    "GenerationRequest",
    "PlaceStage",
    "Placement",
    "PlacementRequest",
    "PostprocessStage",
    "Role",
    "Route",
    "RouteStage",
    "Sink",
    "TextDelta",
    "TokenizeStage",
    "TokenizedPrompt",
    "WorkerEntry",
]


@dataclass(frozen=True)
class Components:
    """Components of a gateway process, shared by all pipelines.

    Attributes:
        registry: the registered workers.
        connections: connections to workers and postprocess replicas.
        stream_manager: the generations in progress.
        tasks: owner of background tasks.
        migration: limits of migration.
        route_timeout_s: timeout of calls to the router.
        post_wait_s: how long a stream waits for a postprocess replica.
        set_up_s: how long a request waits until custom stages are set up for its model.
    """

    preprocess: PreprocessClient
    router: RouterClient
    registry: WorkerRegistry
    connections: ConnectionManager
    stream_manager: StreamManager
    metrics: GatewayMetrics
    tasks: TaskOwner
    migration: MigrationPolicy
    route_timeout_s: float
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
class RouteStage(Protocol):
    """Chooses workers in place of the router. Constructed as `Class(components)`."""

    async def route(self, placement_request: PlacementRequest, workers: Sequence[WorkerEntry]) -> Route:
        """Returns a route to one of the workers, or to a pair of them.

        Args:
            workers: the workers that can run the request, at least one.

        Raises:
            SluiceError: none of the workers is suitable.
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
