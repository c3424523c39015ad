"""Claims of worker ids: each id is held by one process, among the workers of all models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from services.common.base.errors import ErrorKind, SluiceError
from services.common.security.identity import WORKER

CODE = "worker_id_taken"
MIN_SWEPT = 64
"""Claims that are held before expired ones are looked for; with more, whenever their number has doubled."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A process's claim of a worker id.

    Attributes:
        caller: name of the authenticated identity, such as ``worker`` or ``worker/w1``; empty: not authenticated.
        lease_digest: of the secret that the process sends with each registration; empty: it sends none.
        proof: credential and host of the caller, for logs.
    """

    worker_id: str
    epoch: int
    caller: str = ""
    lease_digest: str = ""
    proof: str = ""

    def may_replace(self, held: Claim) -> bool:
        """Returns whether this claim replaces an active one: it is of the same process, or of the id's own identity.

        Of two processes with the id's own identity, the one that started later holds it.
        """
        if self.lease_digest and (self.caller, self.lease_digest) == (held.caller, held.lease_digest):
            return True
        return self.caller == f"{WORKER}/{self.worker_id}" and (held.caller != self.caller or self.epoch > held.epoch)


class Taken(Exception):
    """Another process holds the worker id.

    Args:
        left_ms: until its lease ends unless renewed.
        holder: its claim, as far as known.
    """

    def __init__(self, left_ms: int, holder: Claim) -> None:
        super().__init__(holder.worker_id)
        self.left_ms = max(left_ms, 1)
        self.holder = holder

    @property
    def error(self) -> SluiceError:
        """The error for the rejected process, which reveals nothing about the holder."""
        return SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"Worker id {self.holder.worker_id} is held by another process with an active lease; give each worker a "
            "unique --worker-id.",
            param="registration.worker_id",
            code=CODE,
            retry_after_ms=self.left_ms,
            retryable=True,
        )


class Hold(Enum):
    """State of a stream's claim of a worker id."""

    HELD = "held"
    REPLACED = "replaced"  # another stream holds the id
    GONE = "gone"  # the lease expired, or the store lost it: claim it again


@dataclass(slots=True)
class _Held:
    claim: Claim
    session: str
    until_ms: int


class Claims:
    """Claims in the memory of one process; see Store for the methods.

    Args:
        now_ms: returns Unix milliseconds.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._held: dict[str, _Held] = {}
        self._swept_at = MIN_SWEPT

    def claim(self, claim: Claim, session: str, lease_ms: int) -> None:
        """Acquires an id; raises Taken if another process holds it."""
        now, held = self._now_ms(), self._living(claim.worker_id)
        if held is not None and held.session != session and not claim.may_replace(held.claim):
            raise Taken(held.until_ms - now, held.claim)
        self._held[claim.worker_id] = _Held(claim, session, now + lease_ms)
        if len(self._held) > 2 * self._swept_at:
            self._held = {name: each for name, each in self._held.items() if each.until_ms > now}
            self._swept_at = max(len(self._held), MIN_SWEPT)

    def hold(self, worker_id: str, session: str, lease_ms: int) -> Hold:
        """Renews a lease."""
        held = self._living(worker_id)
        if held is None:
            return Hold.GONE
        if held.session != session:
            return Hold.REPLACED
        held.until_ms = self._now_ms() + lease_ms
        return Hold.HELD

    def release(self, worker_id: str, session: str) -> None:
        """Releases an id if the session holds it."""
        held = self._held.get(worker_id)
        if held is not None and held.session == session:
            del self._held[worker_id]

    def _living(self, worker_id: str) -> _Held | None:
        held = self._held.get(worker_id)
        return held if held is not None and held.until_ms > self._now_ms() else None
