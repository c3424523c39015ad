"""One rank's cache as the worker tells it: what an engine publishes, in order and in everyone's block hashes."""

from __future__ import annotations

from services.worker.contract.cache_events import KvEventSource, KvListener
from services.worker.kv_events.event_sequencer import EventSequencer
from services.worker.kv_events.translation import Translator


class EngineCacheSource(KvEventSource):
    """The source of one data-parallel rank of a real engine.

    A listener hears what is already there first: an engine may have been at work before anybody listened.

    Args:
        rank: data-parallel rank.
        block_size: tokens in a block, as on the model card.
        counts_copies: as in `Translator`.
        can_replay: as in `EventSequencer`.

    Attributes:
        follower: gets the engine's batches.
        translator: holds the mirror.
    """

    def __init__(self, rank: int, block_size: int, *, counts_copies: bool, can_replay: bool) -> None:
        super().__init__(rank)
        self.translator = Translator(block_size, counts_copies=counts_copies)
        self.sequencer = EventSequencer(self.translator, self.publish, can_replay=can_replay)

    def subscribe(self, listener: KvListener) -> None:
        super().subscribe(listener)
        if known := self.translator.snapshot():
            listener(known)

    @property
    def degraded(self) -> str:
        """Why the mirror may lack blocks; empty: it does not."""
        if self.sequencer.losses:
            return "kv_events_lost"
        return "kv_events_unknown_parent" if self.translator.orphans else ""
