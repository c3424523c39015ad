"""KV event batches sent by workers, and the changes that a store publishes in its change feed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import NamedTuple, TypeAlias

from services.router.state.workers.worker import Worker, WorkerRank

HASH_BYTES = 8
MAX_SEQUENCE = 1 << 53
"""Sequence number of KV events, as Lua counts in doubles; a larger one is refused with INVALID_ARGUMENT."""
_HEADER = Struct("<BBI")


class Tier(IntEnum):
    """Memory tier of a block, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class CacheOperation(IntEnum):
    """Kind of a cache operation."""

    STORED = 0
    REMOVED = 1
    CLEARED = 2


_TIERS: dict[int, Tier] = {int(tier): tier for tier in Tier}
_KINDS: dict[int, CacheOperation] = {int(kind): kind for kind in CacheOperation}


class BlockOp(NamedTuple):
    """One operation on a rank's cache. `hashes` is packed u64; CLEARED has no hashes and empties every tier."""

    kind: CacheOperation
    tier: Tier
    hashes: bytes


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Cache operations of one rank in one engine step, in order."""

    rank: int
    sequence: int
    ops: tuple[BlockOp, ...]

    @property
    def bytes(self) -> int:
        """Size of all hashes in bytes."""
        size = 0
        for op in self.ops:
            size += len(op.hashes)
        return size


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Complete cache content of one rank as of `sequence`: packed u64 hashes by tier."""

    rank: int
    sequence: int
    tiers: tuple[bytes, bytes, bytes]

    @property
    def ops(self) -> tuple[BlockOp, ...]:
        """STORED operations that produce this content in an empty cache."""
        return tuple(BlockOp(CacheOperation.STORED, tier, self.tiers[tier]) for tier in Tier if self.tiers[tier])


def encode_ops(ops: Iterable[BlockOp]) -> bytes:
    """Encodes operations as one blob: u8 kind, u8 tier, u32 count and the packed hashes of each.

    The Lua scripts read the same format.
    """
    parts: list[bytes] = []
    for kind, tier, hashes in ops:
        parts.append(_HEADER.pack(kind, tier, len(hashes) // HASH_BYTES))
        parts.append(hashes)
    return b"".join(parts)


def decode_ops(blob: bytes) -> tuple[BlockOp, ...]:
    """Reverses `encode_ops`; raises KeyError for an unknown kind or tier, struct.error for a truncated header."""
    ops, at = [], 0
    while at < len(blob):
        kind, tier, count = _HEADER.unpack_from(blob, at)
        start = at + _HEADER.size
        at = start + count * HASH_BYTES
        ops.append(BlockOp(_KINDS[kind], _TIERS[tier], blob[start:at]))
    return tuple(ops)


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker registered, for the first time or again. A higher epoch starts with empty caches."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """A worker accepts no new requests."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker was removed together with its caches."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """An event batch was applied."""

    slot: WorkerRank
    epoch: int
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class BlocksReplaced:
    """A rank's cache was replaced; followers read its new content, which is too large for the feed, from the store."""

    slot: WorkerRank
    epoch: int
    sequence: int


Change: TypeAlias = WorkerUp | WorkerDraining | WorkerDown | BlocksChanged | BlocksReplaced
