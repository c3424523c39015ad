"""The tokenizer that a model's name belongs to, kept in the store after the model's last worker has left.

Who serves a model decides who may join it (`joining`); while none does, the pin decides about workers whose engine's
server chose the name. A worker whose operator stated the model moves the pin; without any worker it lapses.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from services.router.state.store.base import Store, StoreUnavailable
from services.router.state.store.store_health import StoreHealth
from services.router.state.workers.worker import Worker

RENEWALS = 48
"""How often a pin is renewed in its lifetime, at least every minute."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """The fingerprints of the tokenizer that a name belongs to."""

    fingerprint: str = ""
    prompt_fingerprint: str = ""

    def to_json(self) -> str:
        """Returns the record to store."""
        return json.dumps([self.fingerprint, self.prompt_fingerprint])

    @classmethod
    def from_json(cls, record: str) -> Pinned | None:
        """Returns the pin of a record; None for none, or for one of another version of the router."""
        try:
            fingerprint, prompts = json.loads(record) if record else ("", "")
        except ValueError:
            return None
        return cls(str(fingerprint), str(prompts)) if fingerprint or prompts else None


class NamePin:
    """The pin of one worker's model.

    Args:
        ttl_ms: how long it holds after the last worker of the model was seen; 0: names are not pinned.

    Attributes:
        known: as last read; None: the name belongs to no tokenizer.
        due: when it is to be renewed, seconds of the monotonic clock.
    """

    def __init__(self, store: Store, health: StoreHealth, ttl_ms: int) -> None:
        self._store = store
        self._health = health
        self._ttl_ms = ttl_ms
        self.due = 0.0
        self.known: Pinned | None = None

    async def read(self, worker: Worker) -> None:
        """Reads the pin; keeps the last one known while the store is unavailable."""
        await self._exchange(worker, "", replace=False)

    async def renew(self, worker: Worker) -> None:
        """Binds the name to the tokenizer of a worker that receives requests, or renews the pin, now and then."""
        if time.monotonic() >= self.due and self._health.available:
            self.due = time.monotonic() + min(self._ttl_ms / 1000 / RENEWALS, 60.0)
            await self.pin(worker)

    async def pin(self, worker: Worker) -> None:
        """Binds the name to the tokenizer of a worker that receives requests, or renews the pin."""
        if worker.accepts and (worker.fingerprint or worker.prompt_fingerprint):
            record = Pinned(worker.fingerprint, worker.prompt_fingerprint).to_json()
            await self._exchange(worker, record, replace=not worker.named_by_server)

    async def _exchange(self, worker: Worker, record: str, *, replace: bool) -> None:
        if not self._ttl_ms or not self._health.available:
            return
        try:
            self.known = Pinned.from_json(await self._store.pin(worker.model, record, self._ttl_ms, replace))
        except StoreUnavailable as error:
            self._health.mark_unavailable(error)
