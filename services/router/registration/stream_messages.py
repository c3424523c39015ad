"""Messages between an attached worker and the router."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from services.router.kv_index.events import EventBatch, Tier


@dataclass(frozen=True, slots=True)
class Report:
    """Load report of the worker, as the transport encodes it."""

    document: bytes


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Part of a rank's snapshot."""

    rank: int
    sequence: int
    tier: Tier
    hashes: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker accepts no new requests."""

    reason: str


WorkerMessage: TypeAlias = Report | EventBatch | SnapshotChunk | Leaving


@dataclass(slots=True)
class Replies:
    """Replies to a worker: durable sequence numbers by rank, and ranks whose snapshots are requested, with reasons.

    `outcomes` counts event batches by result, for metrics; it is not sent to the worker.
    """

    acks: dict[int, int] = field(default_factory=dict)
    resyncs: dict[int, str] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
