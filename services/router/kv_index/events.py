"""What happens to caches and workers: event batches as workers send them, changes as stores pass them on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import NamedTuple, TypeAlias

from services.router.workers.worker import Worker, WorkerRank

HASH_BYTES = 8
MAX_SEQUENCE = 1 << 53  # Lua counts in doubles
_HEADER = Struct("<BBI")


class Tier(IntEnum):
    """Where a block lies, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Kind(IntEnum):
    """What happened to blocks."""

    STORED = 0
    REMOVED = 1
    CLEARED = 2


class BlockOp(NamedTuple):
    """One change of one rank's cache. `hashes` is packed u64; a clearing has none and empties every tier."""

    kind: Kind
    tier: Tier
    hashes: bytes


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Cache changes of one rank in one engine step, in order."""

    rank: int
    sequence: int
    ops: tuple[BlockOp, ...]

    @property
    def bytes(self) -> int:
        """Of its hashes."""
        return sum(len(op.hashes) for op in self.ops)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole cache of one rank after `sequence`: packed u64 hashes by tier."""

    rank: int
    sequence: int
    tiers: tuple[bytes, bytes, bytes]

    @property
    def ops(self) -> tuple[BlockOp, ...]:
        """The same as storing operations on an empty cache."""
        return tuple(BlockOp(Kind.STORED, tier, self.tiers[tier]) for tier in Tier if self.tiers[tier])


def encode_ops(ops: Iterable[BlockOp]) -> bytes:
    """One blob: per operation u8 kind, u8 tier, u32 count, then the packed hashes. Scripts read the same form."""
    parts: list[bytes] = []
    for kind, tier, hashes in ops:
        parts.append(_HEADER.pack(kind, tier, len(hashes) // HASH_BYTES))
        parts.append(hashes)
    return b"".join(parts)


def decode_ops(blob: bytes) -> tuple[BlockOp, ...]:
    """Undoes `encode_ops`."""
    return tuple(_decoded(blob))


def _decoded(blob: bytes) -> Iterator[BlockOp]:
    at = 0
    while at < len(blob):
        kind, tier, count = _HEADER.unpack_from(blob, at)
        start = at + _HEADER.size
        at = start + count * HASH_BYTES
        yield BlockOp(Kind(kind), Tier(tier), blob[start:at])


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker registered, anew or again. A higher epoch than before starts with empty caches."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """A worker takes no new requests."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker is gone, and its caches with it."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """A batch was applied."""

    slot: WorkerRank
    epoch: int
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class BlocksReplaced:
    """A rank's cache was replaced as a whole; too large to pass on, so read it from the store."""

    slot: WorkerRank
    epoch: int
    sequence: int


Change: TypeAlias = WorkerUp | WorkerDraining | WorkerDown | BlocksChanged | BlocksReplaced
