"""Interface of stores.

A store holds the state shared by router replicas: workers with leases, their cache content, and reservations. Every
method is atomic. State is separate per model. Changes to workers and caches are appended to the model's change feed,
from which each replica maintains its model state.

Any method may raise StoreUnavailable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from services.common.base.errors import ErrorKind, SluiceError
from services.router.state.kv_index.events import Change, EventBatch, Snapshot
from services.router.state.kv_index.index import BlockIndex
from services.router.state.kv_index.rank_cache import ApplyResult
from services.router.state.reservations.cost import Load, Offer
from services.router.state.reservations.table import QueueOrder, Reservation, ReservationParams, ReservedRank
from services.router.state.workers.claims import Claim, Hold
from services.router.state.workers.worker import Worker, WorkerRank

QUEUE_LEASE_MS = 1_000  # how long an announced queue counts; the queue announces itself more often
ENDED_FOR_MS = 30_000  # how long replicas of the router may take to notice one fail-over
KNOWN_FOR_S = 3600  # how long a model stays known after the last registration of a worker


class StoreUnavailable(SluiceError):
    """The store cannot be reached; the operation may or may not have been executed."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            ErrorKind.UNAVAILABLE,
            f"The router's store cannot be reached ({reason}); retry later.",
            code="store_unavailable",
        )


class FellBehind(Exception):
    """The change feed no longer contains the follower's position; load the state again."""


class Position(NamedTuple):
    """Position in a change feed: the consecutive number of a change, and the store's id of its entry."""

    number: int
    entry: bytes = b""


class Lease(Enum):
    """State of a worker's lease."""

    HELD = "held"
    REPLACED = "replaced"  # a newer stream of this worker holds it
    GONE = "gone"  # expired, or lost by the store: register again


class Applied(NamedTuple):
    """Result of applying a batch or snapshot, and the last durable sequence number of the rank."""

    outcome: ApplyResult
    sequence: int


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Workers of a model and the feed position to follow from; blocks are read per rank.

    `generation` changes when the store loses its data.
    """

    position: Position
    workers: list[Worker]
    generation: bytes = b""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Current loads: reserved by all replicas, by rank, and the last report of each worker."""

    loads: dict[WorkerRank, Load]
    reports: dict[str, bytes]


class Store(ABC):
    """State shared by router replicas; see the module."""

    embedded = False
    """Whether the state lives in this process, so that followers see changes immediately."""

    def index(self, model: str) -> BlockIndex | None:
        """Returns the index that an embedded store maintains, for model states to read; None for other stores."""
        return None

    may_lose_acknowledged = False
    """Whether the last acknowledged changes may be gone after a failure, because a replica took over."""

    shortlist: int | None = None
    """Maximum number of offers for `select`; None: no limit."""

    @abstractmethod
    async def ping(self) -> None:
        """Returns if the store is available."""

    @abstractmethod
    async def close(self) -> None:
        """Closes connections."""

    @abstractmethod
    async def models(self) -> list[str]:
        """Returns the models for which a worker registered within KNOWN_FOR_S."""

    @abstractmethod
    async def claim(self, claim: Claim, session: str, lease_ms: int) -> None:
        """Acquires a worker id, unique among all models, for the stream `session`; call it before `register`.

        Raises:
            Taken: another process holds the id and its lease has not expired.
        """

    @abstractmethod
    async def renew_claim(self, worker_id: str, session: str, lease_ms: int) -> Hold:
        """Renews the lease of a worker id."""

    @abstractmethod
    async def release_claim(self, worker_id: str, session: str) -> None:
        """Releases a worker id if the stream `session` holds it."""

    @abstractmethod
    async def register(self, worker: Worker, session: str, lease_ms: int) -> dict[int, int]:
        """Registers a worker, or renews its registration; the stream `session` owns it from now on.

        A different process, or a higher epoch of the same process, starts with empty caches and without reservations;
        the same epoch of the same process keeps both.

        Returns:
            The last applied sequence number by rank, for ranks that have one.

        Raises:
            SluiceError: FAILED_PRECONDITION if a higher epoch of the same process is registered.
        """

    @abstractmethod
    async def renew(self, model: str, worker_id: str, session: str, lease_ms: int, report: bytes | None) -> Lease:
        """Renews a lease and stores the load report, if given. Appends nothing to the feed."""

    @abstractmethod
    async def leave(self, model: str, worker_id: str, session: str) -> bool:
        """Marks a worker as draining; its reservations remain. Returns False if `session` does not own it."""

    @abstractmethod
    async def remove(
        self, model: str, worker_id: str, session: str, keep_reservations: bool = False, awaited_ms: int = 0
    ) -> bool:
        """Removes a worker. Returns False if `session` does not own it, because it attached elsewhere.

        Args:
            keep_reservations: its requests still run; else its reservations end with it.
            awaited_ms: for how long they are kept all the same, in case that the same process registers again.
        """

    @abstractmethod
    async def apply(
        self, model: str, worker_id: str, epoch: int, capacity: int, batches: Sequence[EventBatch]
    ) -> list[Applied]:
        """Applies event batches of one worker in order, each atomically; see Outcome for the results."""

    @abstractmethod
    async def replace(self, model: str, worker_id: str, epoch: int, capacity: int, snapshot: Snapshot) -> Applied:
        """Replaces a rank's cache content unless the snapshot is older."""

    @abstractmethod
    async def load(self, model: str) -> StoredModel:
        """Returns a consistent copy of workers and feed position."""

    @abstractmethod
    async def blocks(self, model: str, slot: WorkerRank) -> tuple[int, Snapshot] | None:
        """Returns a consistent copy of a rank's epoch and cache content; None if its worker is not registered."""

    @abstractmethod
    def follow(self, model: str, position: Position) -> AsyncIterator[list[Change]]:
        """Yields changes after a position in ordered batches; an empty batch if there was no change for a while.

        Raises:
            FellBehind: the feed no longer contains the position.
        """

    @abstractmethod
    async def select(self, model: str, offers: Sequence[Offer], terms: ReservationParams) -> ReservedRank:
        """Chooses the cheapest of at least one offer by the reservations of all replicas, and reserves it, in one step.

        Raises:
            AllBusy: every offer is at its limits.
        """

    @abstractmethod
    async def book(self, model: str, reservation: Reservation) -> None:
        """Adds a reservation made elsewhere.

        Of two reservations of one request on different ranks, the one that expires later remains: it was made later.
        Does nothing for requests that were freed in the last ENDED_FOR_MS: another replica may have done so meanwhile.
        """

    @abstractmethod
    async def progress(self, model: str, outputs: Mapping[str, int]) -> list[str]:
        """Reserves load for output beyond the expected length; returns the ids without reservations.

        Never reduces a load, so reports may be repeated or late.

        Args:
            outputs: total output in thousandths of a block by request id.
        """

    @abstractmethod
    async def renew_owners(self, model: str, owners: Sequence[str], lease_ms: int) -> None:
        """Renews the leases of owners that have reservations."""

    @abstractmethod
    async def mark_prefill_complete(self, model: str, request_ids: Sequence[str]) -> list[str]:
        """Releases prefill load; returns the ids without reservations."""

    @abstractmethod
    async def free(self, model: str, request_ids: Sequence[str]) -> list[str]:
        """Releases all load; returns the ids without reservations."""

    async def announce_queue(self, model: str, order: QueueOrder | None) -> int:
        """Publishes the order of the first request that waits at this replica; None: its queue is empty.

        Until it is withdrawn or QUEUE_LEASE_MS have passed, `select` under limits raises AllBusy for requests of other
        replicas that it precedes. Returns the number of other replicas with a queue.
        """
        return 0

    @abstractmethod
    async def session(self, model: str, session_id: str) -> WorkerRank | None:
        """Returns the rank of a session's last request; None if it is unknown or expired."""

    @abstractmethod
    async def remember_session(self, model: str, session_id: str, slot: WorkerRank, ttl_ms: int) -> None:
        """Sets the rank of a session for `ttl_ms`."""

    @abstractmethod
    async def pin(self, model: str, record: str, ttl_ms: int, replace: bool) -> str:
        """Binds a model's name to a record for `ttl_ms`, or renews the pin that holds; returns that record.

        Args:
            record: empty only returns the one that holds, or an empty one without a pin.
            replace: the record holds from now on, whatever held before.
        """

    @abstractmethod
    async def pulse(self, model: str) -> Pulse:
        """Returns the current reserved and reported loads."""

    @abstractmethod
    async def sweep(self, model: str, lease_ms: int) -> int:
        """Removes workers with expired leases and expired reservations; returns the number of both.

        Args:
            lease_ms: for how long the reservations of such a worker are kept in case that the same process registers
                again; the lease of every worker and owner if the store's clock has moved since the last call.
        """

    @abstractmethod
    async def correct(self, model: str, slot: WorkerRank, most: int, age_ms: int, computed: bool) -> tuple[int, int]:
        """Reconciles the reservations of a rank that are older than `age_ms` with its reported load.

        Args:
            most: number of requests reported; the oldest reservations beyond it are released.
            computed: no prompt waits for computation; the prefill load of the other reservations is released.

        Returns:
            The number of reservations released, and the number of prompts found computed.
        """

    @abstractmethod
    async def sweep_owners(self, model: str) -> int:
        """Removes reservations whose owner's lease expired, a bounded number per call; returns the number."""
