"""Puts an engine's numbered batches in order: finds gaps, asks for replays, and never lets a replay overtake."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import cache

from services.common.errors import SluiceError
from services.common.observability.instruments import Counter
from services.worker.contract.cache_events import KvEvent
from services.worker.kv_events.events import EngineBatch, MalformedEvents
from services.worker.kv_events.translation import Translator
from services.worker.metrics import EVENT_GAPS, EVENT_LOSSES, EVENT_ORPHANS

log = logging.getLogger(__name__)

MOST_WAITING = 16_384
REMEMBERED = 16_384
REBUILD_EVERY = 1_000


@cache
def _counters() -> tuple[Counter, Counter, Counter]:
    """Shared by the followers of all ranks."""
    return Counter(EVENT_GAPS), Counter(EVENT_LOSSES), Counter(EVENT_ORPHANS)


class EventSequencer:
    """The order of one rank's batches, without any input or output of its own.

    Whoever reads the engine calls `live`; when `replay_from` is set, asks the engine for everything from that number
    on and calls `replayed` for each batch and `replay_ended`. Live batches wait meanwhile.

    Args:
        translator: of the same rank.
        publish: takes what the batches mean.
        can_replay: the engine can be asked; otherwise a gap is a loss at once.

    Attributes:
        expected: number of the next batch.
        replay_from: what to ask the engine for; None: nothing is missing.
        losses: gaps that could not be filled; the mirror has holes since the last one.
    """

    def __init__(
        self, translator: Translator, publish: Callable[[Sequence[KvEvent]], None], *, can_replay: bool
    ) -> None:
        self.expected = 0
        self.replay_from: int | None = None
        self.losses = 0
        self._translator = translator
        self._publish = publish
        self._can_replay = can_replay
        self._waiting: deque[tuple[int, EngineBatch]] = deque(maxlen=MOST_WAITING)
        self._times: OrderedDict[int, float] = OrderedDict()
        self._rebuilds = False
        self._joins = False
        self._since_rebuild = REBUILD_EVERY
        self._gaps, self._lost, self._orphaned = _counters()

    def live(self, sequence: int, batch: EngineBatch) -> None:
        """A batch as the engine published it.

        Raises:
            SluiceError: INVALID_ARGUMENT when the engine's block size does not go together with ours from the start;
                so do `replayed` and `replay_ended`.
        """
        if self._joins:
            self._joins = False
            self.expected = sequence
        if self.replay_from is not None:
            self._waiting.append((sequence, batch))
        elif sequence == self.expected:
            self._apply(sequence, batch)
        elif sequence > self.expected:
            self._gap(sequence, batch)
        elif self._times.get(sequence) != batch.time:
            self._restart(sequence, batch)

    def check(self) -> None:
        """Asks for what may have been missed at the end, when nothing was heard for a while."""
        if self._can_replay and self.replay_from is None:
            self.replay_from = self.expected

    def replayed(self, sequence: int, batch: EngineBatch) -> None:
        """A batch that was asked for."""
        if self._rebuilds:
            self._rebuilds = False
            if sequence == 0:
                self._begin_again()
        if sequence < self.expected:
            return
        if sequence > self.expected:
            self._lose(f"the engine remembers nothing before batch {sequence}")
            self.expected = sequence
        self._apply(sequence, batch)

    def replay_ended(self) -> None:
        """The engine has said everything it was asked for, or has not answered."""
        asked, self.replay_from, self._rebuilds = self.replay_from, None, False
        waiting, self._waiting = self._waiting, deque(maxlen=MOST_WAITING)
        if waiting and asked == self.expected < waiting[0][0]:
            self._lose("the engine does not replay them")
            self.expected = waiting[0][0]
        for sequence, batch in waiting:
            self.live(sequence, batch)

    def begin_at(self, sequence: int) -> None:
        """A snapshot follows that starts with this number: nothing of before counts any more."""
        self._begin_again()
        self.expected = sequence

    def join(self) -> None:
        """The next batch is the first one that can be had, whatever its number; nothing was claimed before."""
        self._translator.heal()
        self._joins = True

    def interrupted(self) -> None:
        """The engine goes on where it is now, and nobody knows what was missed before."""
        self._lose("the engine does not say what happened meanwhile")
        self._joins = True

    def unreadable(self, sequence: int) -> None:
        """A batch that says nothing we understand."""
        self._lose(f"batch {sequence} cannot be read")
        self.expected = max(self.expected, sequence + 1)

    def _gap(self, sequence: int, batch: EngineBatch) -> None:
        self._gaps.add(1)
        if self._can_replay:
            log.info("KV events are missing", extra={"from": self.expected, "to": sequence})
            self.replay_from = self.expected
            self._waiting.append((sequence, batch))
            return
        self._lose("this engine cannot replay them")
        self.expected = sequence
        self._apply(sequence, batch)

    def _restart(self, sequence: int, batch: EngineBatch) -> None:
        log.warning("the engine counts its KV events anew", extra={"expected": self.expected, "found": sequence})
        self._begin_again()
        self.live(sequence, batch)

    def _begin_again(self) -> None:
        self.expected = 0
        self._times.clear()
        self._publish(self._translator.reset())

    def _lose(self, why: str) -> None:
        self.losses += 1
        self._lost.add(1)
        log.warning("KV events are lost: %s", why)
        self._publish(self._translator.lose())

    def _apply(self, sequence: int, batch: EngineBatch) -> None:
        orphans = self._translator.orphans
        events = self._translated(sequence, batch)
        self.expected = sequence + 1
        self._times[sequence] = batch.time
        if len(self._times) > REMEMBERED:
            self._times.popitem(last=False)
        if events:
            self._publish(events)
        self._since_rebuild += 1
        if orphaned := self._translator.orphans - orphans:
            self._orphaned.add(orphaned)
            self._consider_rebuild()

    def _translated(self, sequence: int, batch: EngineBatch) -> Sequence[KvEvent]:
        """What a batch means; one that makes no sense is lost, because a worker outlives a strange event."""
        try:
            return self._translator.apply(batch.events)
        except SluiceError:
            raise
        except MalformedEvents as error:
            log.warning("%s", error)
        except Exception:
            log.exception("a batch of KV events cannot be translated")
        self.unreadable(sequence)
        return ()

    def _consider_rebuild(self) -> None:
        """What came before is unknown: the whole story again, if the engine still has it; now and then at most."""
        if self._can_replay and self.replay_from is None and self._since_rebuild >= REBUILD_EVERY:
            log.info("blocks follow others that were never reported; asking for every KV event again")
            self._since_rebuild = 0
            self._rebuilds = True
            self.replay_from = 0
