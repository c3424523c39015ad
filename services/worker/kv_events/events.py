"""What an engine says about its own cache, in the engine's own block hashes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.contract.cache_events import CacheTier

EngineHash = int | bytes
"""Opaque; unsigned 64-bit, or bytes where the engine was told to publish whole digests."""

_TIERS = {
    "": CacheTier.DEVICE,
    "GPU": CacheTier.DEVICE,
    "CPU": CacheTier.HOST,
    "CPU_PINNED": CacheTier.HOST,
}
PREFIX_KINDS = frozenset({"", "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of caches whose blocks stay as long as the prefix can be reused; others forget what left their window."""


class MalformedEvents(ValueError):
    """An engine's message cannot be read; says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class EngineStored:
    """Full blocks that follow each other.

    Attributes:
        token_ids: block_size for each hash, or none: then the hashes are known from an earlier event.
        parent: block before the first one; None at the start of a sequence.
        salt: tenant salt of the sequence, as far as this event says it.
        opaque_from: index of the first hash into which more went than tokens, adapter and salt, such as an image; what
            follows it is as opaque. None: all are plain.
        group: cache group of a hybrid model; None where the engine has only one.
        kind: what the group's cache is, in vLLM's words; empty: not said.
    """

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    token_ids: array[int]
    block_size: int
    tier: CacheTier = CacheTier.DEVICE
    lora: str = ""
    salt: str = ""
    opaque_from: int | None = None
    group: int | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """Blocks of one tier that are gone."""

    hashes: Sequence[EngineHash]
    tier: CacheTier = CacheTier.DEVICE
    group: int | None = None


@dataclass(frozen=True, slots=True)
class EngineCleared:
    """Every block is gone."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """The events of one scheduler step; `time` is the engine's clock, Unix seconds."""

    events: Sequence[EngineEvent]
    time: float = 0.0
    rank: int | None = None


def tier_of(medium: str | None) -> CacheTier:
    """The tier behind an engine's word for it; words we do not know are storage, the slowest."""
    return _TIERS.get(medium or "", CacheTier.DISK)


def plain_hash(value: object) -> EngineHash:
    """An engine's hash as it is kept: signed ones become unsigned; MalformedEvents for anything that is no hash."""
    if isinstance(value, bool) or not isinstance(value, int | bytes):
        raise MalformedEvents(f"a block hash is {type(value).__name__}")
    return value & 0xFFFF_FFFF_FFFF_FFFF if isinstance(value, int) else value
