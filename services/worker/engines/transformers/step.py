"""Messages from the batching thread to the event loop, one per step."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, KvEvent
from services.worker.contract.generation import PositionLogprobs


class StepRow(NamedTuple):
    """One request's token of a step. `cached_tokens` is set on the first token; `ended` marks the last one."""

    key: str
    token_id: int
    cached_tokens: int | None
    logprobs: PositionLogprobs | None
    ended: bool
    error: str = ""


@dataclass(slots=True)
class Step:
    """Result of one step: new tokens, changes of the prefix cache, and failed requests as (key, error)."""

    rows: list[StepRow] = field(default_factory=list)
    events: list[KvEvent] = field(default_factory=list)
    failed: list[tuple[str, Exception]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.events or self.failed)


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks for steps, the exit of the batching thread, and start phases; called in the engine's threads."""

    on_step: Callable[[Step], None]
    on_end: Callable[[], None]
    on_phase: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Gauges:
    """Metrics of the batching thread; replaced as a whole after each step, so that any thread can read them."""

    running: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    prefill_tokens: int = 0
    step_ms: float = 0.0


class CacheChanges:
    """Collects the changes of the prefix cache within a step, in order."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def stored(self, block_hash: int) -> None:
        """Records that a full block can be reused."""
        self._add(BlocksStored, block_hash)

    def removed(self, block_hash: int) -> None:
        """Records that a block can no longer be reused."""
        self._add(BlocksRemoved, block_hash)

    def take(self) -> list[KvEvent]:
        """Returns and clears the changes; consecutive changes of the same kind form one event."""
        events, self._events = self._events, []
        return events

    def _add(self, kind: type[BlocksStored] | type[BlocksRemoved], block_hash: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, kind):
            last.hashes.append(block_hash)
        else:
            self._events.append(kind(array("Q", (block_hash,))))
