"""Orders an engine's numbered event batches, detects gaps, and merges replayed batches with live ones."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import cache

from services.common.base.errors import SluiceError
from services.common.observability.instruments import Counter
from services.worker.contract.cache_events import KvEvent
from services.worker.kv_events.events import EngineBatch, MalformedEvents
from services.worker.kv_events.groups import GroupTranslator
from services.worker.metrics import EVENT_GAPS, EVENT_LOSSES, EVENT_ORPHANS

log = logging.getLogger(__name__)

MAX_HELD = 16_384
"""Batches kept while the engine replays missed ones; the oldest are dropped, and count as lost."""
MAX_TIMES = 16_384
"""Batches whose time is remembered."""
REBUILD_EVERY = 1_000
UNREADABLE = -1.0  # in place of the time of a batch that could not be decoded


@cache
def _counters() -> tuple[Counter, Counter, Counter]:
    """Returns the counters, which the sequencers of all ranks share."""
    return Counter(EVENT_GAPS), Counter(EVENT_LOSSES), Counter(EVENT_ORPHANS)


class EventSequencer:
    """Orders the batches of one rank; performs no I/O.

    The reader of the engine's events calls `live` for each batch. While `replay_from` is set, it must request all
    batches from that number on, call `replayed` for each of them, and then `replay_ended`; live batches are held
    meanwhile.

    Args:
        translator: translator of the same rank.
        publish: called with the translated events.
        can_replay: whether the engine can replay batches; otherwise a gap is a loss.

    Attributes:
        expected: number of the next batch.
        replay_from: first batch to request from the engine; None: none is missing.
        losses: number of gaps that could not be filled; after one, the known cache may be incomplete.
    """

    def __init__(
        self, translator: GroupTranslator, publish: Callable[[Sequence[KvEvent]], None], *, can_replay: bool
    ) -> None:
        self.expected = 0
        self.replay_from: int | None = None
        self.losses = 0
        self._translator = translator
        self._publish = publish
        self._can_replay = can_replay
        self._held: deque[tuple[int, EngineBatch]] = deque(maxlen=MAX_HELD)
        self._times: OrderedDict[int, float] = OrderedDict()
        self._rebuilds = False
        self._joins = False
        self._since_rebuild = REBUILD_EVERY
        self._gaps, self._lost, self._orphaned = _counters()

    def live(self, sequence: int, batch: EngineBatch) -> None:
        """Accepts a batch that the engine has published.

        Raises:
            SluiceError: INVALID_ARGUMENT when the engine's block size is incompatible with the configured one from the
                start; `replayed` and `replay_ended` raise it as well.
        """
        if self._joins:
            self._joins = False
            self.expected = sequence
        if self.replay_from is not None:
            self._held.append((sequence, batch))
        elif sequence == self.expected:
            self._apply(sequence, batch)
        elif sequence > self.expected:
            self._gap(sequence, batch)
        elif self._times.get(sequence) != batch.time:
            self._restart(sequence, batch)

    def check(self) -> None:
        """Requests a replay from `expected`, to detect batches lost before an idle period."""
        if self._can_replay and self.replay_from is None:
            self.replay_from = self.expected

    def replayed(self, sequence: int, batch: EngineBatch) -> None:
        """Accepts a replayed batch."""
        if self._rebuilds:
            self._rebuilds = False
            if sequence == 0:
                self._reset()
        if sequence < self.expected:
            return
        if sequence > self.expected:
            self._lose(f"the engine has no batches before {sequence}")
            self.expected = sequence
        self._apply(sequence, batch)

    def replay_ended(self) -> None:
        """Ends a replay, whether it was complete or failed, and processes the held live batches."""
        requested, self.replay_from, self._rebuilds = self.replay_from, None, False
        held, self._held = self._held, deque(maxlen=MAX_HELD)
        if held and requested == self.expected < held[0][0]:
            self._lose("the engine did not replay them")
            self.expected = held[0][0]
        for sequence, batch in held:
            self.live(sequence, batch)

    def begin_at(self, sequence: int) -> None:
        """Discards all state before a snapshot that starts with this batch."""
        self._reset()
        self.expected = sequence

    def join(self) -> None:
        """Continues with the next batch, whatever its number, on the first connection to the engine."""
        self._translator.heal()
        self._joins = True

    def interrupted(self) -> None:
        """Continues with the next batch, whatever its number, after a lost connection to the engine."""
        self._lose("the connection to the engine was interrupted")
        self._joins = True

    def disconnected(self) -> None:
        """Handles the end of a connection: what cannot be replayed is unknown from now on."""
        if self._can_replay:
            self.check()
        else:
            self.interrupted()

    def unreadable(self, sequence: int, replayed: bool = False) -> None:
        """Skips a batch that cannot be decoded; one that was processed or skipped before is nothing new."""
        known = replayed or self._times.get(sequence) == UNREADABLE
        if known and sequence < self.expected:
            return
        self._lose(f"batch {sequence} cannot be decoded")
        self.expected = max(self.expected, sequence + 1)
        self._remember(sequence, UNREADABLE)

    def _gap(self, sequence: int, batch: EngineBatch) -> None:
        self._gaps.add(1)
        if self._can_replay:
            log.info("gap in KV events", extra={"from": self.expected, "to": sequence})
            self.replay_from = self.expected
            self._held.append((sequence, batch))
            return
        self._lose("this engine cannot replay them")
        self.expected = sequence
        self._apply(sequence, batch)

    def _restart(self, sequence: int, batch: EngineBatch) -> None:
        log.warning("engine restarted its KV event sequence", extra={"expected": self.expected, "found": sequence})
        self._reset()
        self.live(sequence, batch)

    def _reset(self) -> None:
        self.expected = 0
        self._times.clear()
        self._publish(self._translator.reset())

    def _lose(self, why: str) -> None:
        self.losses += 1
        self._lost.add(1)
        log.warning("KV events were lost: %s", why)
        self._publish(self._translator.lose())

    def _apply(self, sequence: int, batch: EngineBatch) -> None:
        orphans = self._translator.orphans
        events = self._translated(sequence, batch)
        self.expected = sequence + 1
        self._remember(sequence, batch.time)
        if events:
            self._publish(events)
        self._since_rebuild += 1
        if orphaned := self._translator.orphans - orphans:
            self._orphaned.add(orphaned)
            self._consider_rebuild()

    def _remember(self, sequence: int, time: float) -> None:
        self._times[sequence] = time
        if len(self._times) > MAX_TIMES:
            self._times.popitem(last=False)

    def _translated(self, sequence: int, batch: EngineBatch) -> Sequence[KvEvent]:
        """Translates a batch; one that cannot be translated is lost and does not end the worker."""
        try:
            return self._translator.apply(batch.events)
        except SluiceError:
            raise
        except MalformedEvents as error:
            log.warning("%s", error)
        except Exception:
            log.exception("batch of KV events cannot be translated")
        self.unreadable(sequence)
        return ()

    def _consider_rebuild(self) -> None:
        """Requests a replay of all batches to recover unknown parent blocks, at most once per REBUILD_EVERY batches."""
        if self._can_replay and self.replay_from is None and self._since_rebuild >= REBUILD_EVERY:
            log.info("blocks have unknown parents; requesting a replay of all KV events")
            self._since_rebuild = 0
            self._rebuilds = True
            self.replay_from = 0
