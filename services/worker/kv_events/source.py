"""The cache event source of one rank of an engine that publishes KV events."""

from __future__ import annotations

from services.worker.contract.cache_events import KvEventSource, KvListener
from services.worker.kv_events.event_sequencer import EventSequencer
from services.worker.kv_events.groups import GroupTranslator


class EngineCacheSource(KvEventSource):
    """Publishes an engine's events, ordered and translated.

    A new listener first receives the current cache, because the engine may have cached blocks before.

    Args:
        rank: data-parallel rank.
        block_size: tokens per block, as on the model card.
        counts_copies: as in `Translator`.
        can_replay: as in `EventSequencer`.

    Attributes:
        sequencer: receives the engine's batches.
        translator: holds the current cache.
    """

    def __init__(self, rank: int, block_size: int, *, counts_copies: bool, can_replay: bool) -> None:
        super().__init__(rank)
        self.translator = GroupTranslator(block_size, counts_copies=counts_copies)
        self.sequencer = EventSequencer(self.translator, self.publish, can_replay=can_replay)

    def subscribe(self, listener: KvListener) -> None:
        super().subscribe(listener)
        if current := self.translator.snapshot():
            listener(current)

    @property
    def degraded(self) -> str:
        """Reason why the known cache may lack blocks; empty: it is complete."""
        if self.sequencer.losses:
            return "kv_events_lost"
        return "kv_events_unknown_parent" if self.translator.orphans else ""
