"""The stages of the pipeline, as whoever replaces one has to write it, and the parts that each may use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from services.common.tasks import TaskOwner
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.clients.router import RouterClient
from services.gateway.core.request import Finish, FinishReason, GenerationRequest, Role, Route, Sink, TokenizedPrompt
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement.selector import Placement, PlacementRequest
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
    """What a gateway's process has, whatever its pipeline is.

    Attributes:
        catalogue: the workers alive.
        fleet: connections to them.
        switchboard: the generations under way.
        tasks: owns what goes on in the background.
        migration: how generations move, if they may.
        route_timeout_s: longest wait for the router.
        post_wait_s: longest wait for a postprocess replica.
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


@runtime_checkable
class TokenizeStage(Protocol):
    """Makes token ids of prompts. Made as `Class(components)`."""

    async def tokenize(self, request: GenerationRequest, worker: WorkerEntry) -> TokenizedPrompt:
        """The prompt of a request.

        Args:
            worker: one of those that may run it; its `block_size` is that of the block hashes.

        Raises:
            SluiceError: what the client is to hear.
        """


@runtime_checkable
class RouteStage(Protocol):
    """Chooses workers, in place of the router. Made as `Class(components)`."""

    async def route(self, wanted: PlacementRequest, workers: Sequence[WorkerEntry]) -> Route:
        """One of the workers, or a pair of them; SluiceError when none will do.

        Args:
            workers: those that can do what is wanted, at least one.
        """


@runtime_checkable
class PlaceStage(Protocol):
    """Chooses workers and sees to their connections. Made as `Class(components)`."""

    async def place(self, wanted: PlacementRequest, excluded: Collection[str] = ()) -> Placement:
        """A worker with a connection.

        Args:
            excluded: ids of workers that must not be chosen.

        Raises:
            SluiceError: retryable when another try may find somebody; nothing is booked then.
        """


class TextDelta(NamedTuple):
    """The next text of a choice; `stopped`: this is where it ends, and the engine may stop."""

    text: str = ""
    reasoning: str = ""
    stopped: bool = False


class CustomStream(Protocol):
    """The text of one choice. Called on the event loop for each batch of its tokens: no waiting, no I/O."""

    def feed(self, token_ids: Sequence[int]) -> TextDelta:
        """What the next tokens say."""

    def end(self, reason: FinishReason, stop_token_id: int | None) -> TextDelta:
        """What was held back; the engine is done."""


@runtime_checkable
class PostprocessStage(Protocol):
    """Makes text of tokens. Made as `Class(components)`."""

    def open(self, request: GenerationRequest, prompt: TokenizedPrompt) -> CustomStream:
        """A choice begins. Called again for the same choice when its text is taken up anew."""
