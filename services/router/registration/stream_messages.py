"""What an attached worker and the router say to each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from services.router.kv_index.events import EventBatch, Tier


@dataclass(frozen=True, slots=True)
class Report:
    """How the worker is doing, as the transport encodes it."""

    document: bytes


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """A piece of a rank's snapshot."""

    rank: int
    sequence: int
    tier: Tier
    hashes: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker takes no new requests."""

    reason: str


Said: TypeAlias = Report | EventBatch | SnapshotChunk | Leaving


@dataclass(slots=True)
class Replies:
    """What the worker should hear: durable sequence numbers by rank, and ranks to send a snapshot of, with reasons.

    `outcomes` is not for the worker: how many event batches became what.
    """

    acks: dict[int, int] = field(default_factory=dict)
    resyncs: dict[int, str] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
