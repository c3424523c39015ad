"""What the engine's thread tells the event loop: plain data, one message a step."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, KvEvent
from services.worker.contract.generation import PositionLogprobs


class Row(NamedTuple):
    """One request's token of a step. `cached` comes with the first one; `ended` says that it was the last."""

    key: str
    token_id: int
    cached: int | None
    logprobs: PositionLogprobs | None
    ended: bool
    error: str = ""


@dataclass(slots=True)
class Step:
    """One step's rows, what became of the prefix cache, and requests that failed with why."""

    rows: list[Row] = field(default_factory=list)
    events: list[KvEvent] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.events or self.failed)


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears from the engine's thread, and before that from the one that loads; called in those threads."""

    on_step: Callable[[Step], None]
    on_end: Callable[[], None]
    on_phase: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Gauges:
    """How the engine's thread is doing; made anew each step, so that any thread may read it."""

    running: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    prefill_tokens: int = 0
    step_ms: float = 0.0


class CacheChanges:
    """Collects what is stored in and removed from the prefix cache within a step, in order."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def stored(self, block_hash: int) -> None:
        """A full block can be reused from now on."""
        self._add(BlocksStored, block_hash)

    def removed(self, block_hash: int) -> None:
        """A block cannot be reused any more."""
        self._add(BlocksRemoved, block_hash)

    def take(self) -> list[KvEvent]:
        """Everything since the last call; runs of the same kind are one event."""
        events, self._events = self._events, []
        return events

    def _add(self, kind: type[BlocksStored] | type[BlocksRemoved], block_hash: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, kind):
            last.hashes.append(block_hash)
        else:
            self._events.append(kind(array("Q", (block_hash,))))
