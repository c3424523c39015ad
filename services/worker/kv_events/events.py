"""Cache events as engines report them, in the engine's own block hashes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.contract.cache_events import CacheTier

EngineHash = int | bytes
"""An opaque block hash: an unsigned 64-bit integer, or bytes where the engine publishes complete digests."""

BlockItem = tuple[bytes, int]
"""A media item with tokens in a block: content hash, and offset of its first token from the block's first."""

_TIERS = {
    "": CacheTier.DEVICE,
    "GPU": CacheTier.DEVICE,
    "CPU": CacheTier.HOST,
    "CPU_PINNED": CacheTier.HOST,
}
PREFIX_KINDS = frozenset({"", "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of caches whose blocks stay reusable as a prefix; sliding-window and similar caches drop older blocks."""


class MalformedEvents(ValueError):
    """An engine's message is malformed."""


@dataclass(frozen=True, slots=True)
class EngineStored:
    """Consecutive full blocks that were stored.

    Attributes:
        hashes: the blocks' hashes.
        parent: the block before the first; None at the start of a sequence.
        token_ids: `block_size` ids per hash; empty when the hashes are known from an earlier event.
        block_size: tokens per engine block.
        tier: the tier on which the blocks were stored.
        lora: name of the adapter; empty: none.
        salt: tenant salt of the sequence, if this event contains it.
        opaque_from: index of the first hash computed from more than tokens, adapter and salt, such as an image; all
            later hashes are opaque as well. None: none is.
        media: for each hash, the media items that have tokens in its block, in order: content hash, and offset of their
            first token from the block's first, negative for an item that began in an earlier block. Empty: no block
            has any.
        group: cache group of a hybrid model; None for an engine with a single group.
        kind: kind of the group's cache, in vLLM's terms; empty: not reported.
    """

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    token_ids: array[int]
    block_size: int
    tier: CacheTier = CacheTier.DEVICE
    lora: str = ""
    salt: str = ""
    opaque_from: int | None = None
    media: Sequence[Sequence[BlockItem]] = ()
    group: int | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """Blocks that were removed from one tier."""

    hashes: Sequence[EngineHash]
    tier: CacheTier = CacheTier.DEVICE
    group: int | None = None


@dataclass(frozen=True, slots=True)
class EngineCleared:
    """The removal of all blocks."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """The events of one scheduler step; `time` is the engine's time in Unix seconds."""

    events: Sequence[EngineEvent]
    time: float = 0.0
    rank: int | None = None


def tier_of(medium: str | None) -> CacheTier:
    """Returns the tier of an engine's storage medium; unknown media count as disk, the slowest."""
    return _TIERS.get(medium or "", CacheTier.DISK)


def plain_hash(value: object) -> EngineHash:
    """Normalizes an engine's hash to unsigned; raises MalformedEvents for a value that is not a hash."""
    if isinstance(value, bool) or not isinstance(value, int | bytes):
        raise MalformedEvents(f"a block hash is a {type(value).__name__}, expected an integer or bytes")
    return value & 0xFFFF_FFFF_FFFF_FFFF if isinstance(value, int) else value
