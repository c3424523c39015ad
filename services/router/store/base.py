"""The store interface.

A store holds the truth that router replicas share: workers with leases, what their caches hold, and the load book.
Every method is one atomic step. Everything belongs to one model; nothing mixes models. Whatever changes workers or
caches is appended to the model's change feed, from which each replica keeps its view.

Any method may raise StoreUnavailable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from services.common.errors import ErrorKind, SluiceError
from services.router.kv_index.events import Change, EventBatch, Snapshot
from services.router.kv_index.index import BlockIndex
from services.router.kv_index.rank_cache import Outcome
from services.router.reservations.cost import Load, Offer
from services.router.reservations.table import Choice, Reservation, ReservationParams
from services.router.workers.claims import Claim, Hold
from services.router.workers.worker import Worker, WorkerRank

KNOWN_FOR_S = 3600  # a model stays known this long after a worker last registered for it


class StoreUnavailable(SluiceError):
    """The store cannot be reached; whether the step was done is not known."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            ErrorKind.UNAVAILABLE, f"The router's store cannot be reached ({reason}).", code="store_unavailable"
        )


class FellBehind(Exception):
    """The change feed does not reach back to where the follower was: load again."""


class Position(NamedTuple):
    """A place in a change feed: changes are numbered without holes; `entry` is the store's own name for it."""

    number: int
    entry: bytes = b""


class Lease(Enum):
    """What became of a worker's lease."""

    HELD = "held"
    REPLACED = "replaced"  # another attachment of this worker took over
    GONE = "gone"  # expired and cleared, or the store lost it: register again


class Applied(NamedTuple):
    """What became of a batch or snapshot, and the last sequence number that is durable for the rank."""

    outcome: Outcome
    sequence: int


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The workers of a model and the place in the feed from where to follow. Blocks are read slot by slot.

    `generation` is another one after the store has lost what it held.
    """

    position: Position
    workers: list[Worker]
    generation: bytes = b""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Loads now: booked by all replicas, by rank, and as last reported by each worker."""

    loads: dict[WorkerRank, Load]
    reports: dict[str, bytes]


class Store(ABC):
    """See the module."""

    embedded = False
    """True when the state lives and dies with this process and followers see a change at once."""

    def index(self, model: str) -> BlockIndex | None:
        """The index that the store itself keeps and changes, if it lies in this process: views read it as it is."""
        return None

    shortlist: int | None = None
    """Most offers `select` should get; None for no limit."""

    @abstractmethod
    async def ping(self) -> None:
        """Returns when the store works; prepares it after it was away."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go of connections."""

    @abstractmethod
    async def models(self) -> list[str]:
        """Models that a worker registered for within KNOWN_FOR_S."""

    @abstractmethod
    async def claim(self, claim: Claim, session: str, lease_ms: int) -> None:
        """Takes a worker id for the attachment `session`, among the workers of all models; before `register`.

        Raises:
            Taken: another process holds it, and its lease lives.
        """

    @abstractmethod
    async def renew_claim(self, worker_id: str, session: str, lease_ms: int) -> Hold:
        """Prolongs the lease of a worker id."""

    @abstractmethod
    async def release_claim(self, worker_id: str, session: str) -> None:
        """Gives a worker id back, if the attachment `session` holds it."""

    @abstractmethod
    async def register(self, worker: Worker, session: str, lease_ms: int) -> dict[int, int]:
        """Enters a worker, or renews its entry; the attachment `session` owns it from now on.

        Another process than the one known, and a higher epoch of the same, start with empty caches and without
        reservations; the same epoch of the same process keeps both.

        Returns:
            The last sequence number applied, by rank, for ranks that have one.

        Raises:
            SluiceError: FAILED_PRECONDITION when a higher epoch of the same process is registered.
        """

    @abstractmethod
    async def renew(self, model: str, worker_id: str, session: str, lease_ms: int, report: bytes | None) -> Lease:
        """Prolongs a lease; keeps the worker's load report if one is given. Not a change of the feed."""

    @abstractmethod
    async def leave(self, model: str, worker_id: str, session: str) -> bool:
        """The worker takes no new requests; what is booked on it stays. False when `session` does not own it."""

    @abstractmethod
    async def remove(self, model: str, worker_id: str, session: str, keep_reservations: bool = False) -> bool:
        """The worker is gone. False when `session` does not own it any more: then it is elsewhere."""

    @abstractmethod
    async def apply(
        self, model: str, worker_id: str, epoch: int, capacity: int, batches: Sequence[EventBatch]
    ) -> list[Applied]:
        """Applies event batches of one worker in order, each atomically; see Outcome for what may become of one."""

    @abstractmethod
    async def replace(self, model: str, worker_id: str, epoch: int, capacity: int, snapshot: Snapshot) -> Applied:
        """Replaces what a rank holds, unless the snapshot is older than that."""

    @abstractmethod
    async def load(self, model: str) -> StoredModel:
        """Workers and feed position, from one moment."""

    @abstractmethod
    async def blocks(self, model: str, slot: WorkerRank) -> tuple[int, Snapshot] | None:
        """Epoch and content of one rank, from one moment; None when its worker is not there."""

    @abstractmethod
    def follow(self, model: str, position: Position) -> AsyncIterator[list[Change]]:
        """Changes after a position, in order, in batches; an empty batch says that there was nothing for a while.

        Raises:
            FellBehind: the feed does not reach back to the position.
        """

    @abstractmethod
    async def select(self, model: str, offers: Sequence[Offer], terms: ReservationParams) -> Choice:
        """Chooses the cheapest of at least one offer by what all replicas booked, and books it, in one step.

        Raises:
            AllBusy: every offer is at its limits.
        """

    @abstractmethod
    async def book(self, model: str, reservation: Reservation) -> None:
        """Enters a reservation made elsewhere, unless its request id is booked already."""

    @abstractmethod
    async def progress(self, model: str, outputs: Mapping[str, int]) -> list[str]:
        """Books output beyond what is booked for it, by request id, thousandths of a block in all; returns the ids that
        are not booked. Never lowers anything, so that reports may come twice or late."""

    @abstractmethod
    async def renew_owners(self, model: str, owners: Sequence[str], lease_ms: int) -> None:
        """Prolongs the leases of owners that have reservations."""

    @abstractmethod
    async def mark_prefill_complete(self, model: str, request_ids: Sequence[str]) -> list[str]:
        """Gives prefill load back; returns the ids that are not booked."""

    @abstractmethod
    async def free(self, model: str, request_ids: Sequence[str]) -> list[str]:
        """Gives all load back; returns the ids that are not booked."""

    @abstractmethod
    async def session(self, model: str, session_id: str) -> WorkerRank | None:
        """The rank a session's last request went to; None when that is forgotten."""

    @abstractmethod
    async def remember_session(self, model: str, session_id: str, slot: WorkerRank, ttl_ms: int) -> None:
        """Remembers it for this long."""

    @abstractmethod
    async def pulse(self, model: str) -> Pulse:
        """Booked and reported loads now."""

    @abstractmethod
    async def sweep(self, model: str) -> int:
        """Clears workers whose lease expired and reservations nobody freed in time; returns how many of both."""

    @abstractmethod
    async def correct(self, model: str, slot: WorkerRank, most: int, age_ms: int, computed: bool) -> tuple[int, int]:
        """Fits what was booked on a rank longer than `age_ms` ago to what it says it has.

        Args:
            most: requests it has; the oldest reservations beyond that are given back.
            computed: no prompt waits there; the prefill load of the others is given back.

        Returns:
            How many reservations were given back, and how many prompts were found computed.
        """

    @abstractmethod
    async def sweep_owners(self, model: str) -> int:
        """Clears reservations whose owner's lease expired, a bounded number at once; returns how many."""
