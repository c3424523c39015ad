"""Stores files and batches in this process."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.gateway.apis.batches.pieces import Pieces
from services.gateway.apis.batches.records import OPEN, BatchRecord, FileRecord, Status
from services.gateway.apis.batches.store import (
    PER_FILE,
    WINDOW_S,
    BatchClaim,
    BatchStore,
    Limits,
    LineResult,
    StoredBatch,
    cancelling,
    charge_of,
    result_file,
)


@dataclass(slots=True)
class _File:
    """A file; `record` is None while its batch runs."""

    data: Pieces
    charged: int
    record: FileRecord | None = None


@dataclass(slots=True)
class _Batch:
    record: BatchRecord
    charged: int
    expires_at: float
    done: bytearray
    completed: int = 0
    failed: int = 0
    epoch: int = 0
    lease_until: float = 0.0
    held: bool = False
    lost: int = 0

    @property
    def stored(self) -> StoredBatch:
        return StoredBatch(self.record, self.completed, self.failed)


@dataclass(slots=True)
class _Tenant:
    files: dict[str, _File] = field(default_factory=dict)
    batches: dict[str, _Batch] = field(default_factory=dict)
    uploads: int = 0
    used: int = 0


class MemoryBatchStore(BatchStore):
    """See BatchStore.

    Args:
        kept_s: seconds for which ended batches and their results are kept; uploaded files have their own time.
        clock: returns the seconds since the epoch.
    """

    def __init__(self, limits: Limits, kept_s: float, clock: Callable[[], float] = time.time) -> None:
        super().__init__(limits)
        self._kept_s = kept_s
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._turns: dict[str, int] = {}  # number of the last turn by tenant, 0 for none yet
        self._expiries: list[tuple[float, Literal["file", "batch"], str, str]] = []
        self._used = 0

    async def add_file(self, owner: str, file: FileRecord, data: bytes) -> None:
        self._expire()
        tenant, charged = self._tenant(owner), len(data) + PER_FILE
        if tenant.uploads >= self._limits.files:
            raise self.refused("files")
        self._charge(owner, charged)
        tenant.files[file.id] = _File(Pieces(data), charged, file)
        tenant.uploads += 1
        heapq.heappush(self._expiries, (file.expires_at, "file", owner, file.id))

    async def file(self, owner: str, file_id: str) -> FileRecord | None:
        found = self._file(owner, file_id)
        return found.record if found else None

    async def read(self, owner: str, file_id: str, start: int, size: int) -> bytes | None:
        found = self._file(owner, file_id)
        return found.data.read(start, size) if found else None

    async def files(self, owner: str) -> list[FileRecord]:
        self._expire()
        found = [file.record for file in self._tenant(owner).files.values() if file.record is not None]
        return sorted(found, key=lambda file: (file.created_at, file.id))

    async def remove_file(self, owner: str, file_id: str) -> bool:
        return self._file(owner, file_id) is not None and self._drop_file(owner, file_id)

    async def add_batch(self, batch: BatchRecord, lines: int) -> None:
        self._expire()
        tenant, charged = self._tenant(batch.owner), charge_of(batch, lines)
        if len(tenant.batches) >= self._limits.batches:
            raise self.refused("batches")
        self._charge(batch.owner, charged)
        expires_at = self._clock() + WINDOW_S + self._kept_s
        tenant.batches[batch.id] = _Batch(batch, charged, expires_at, bytearray(lines // 8 + 1))
        self._turns.setdefault(batch.owner, 0)
        heapq.heappush(self._expiries, (expires_at, "batch", batch.owner, batch.id))

    async def batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        self._expire()
        found = self._batch(owner, batch_id)
        return found.stored if found else None

    async def batches(self, owner: str) -> list[StoredBatch]:
        self._expire()
        return [found.stored for found in self._tenant(owner).batches.values()]

    async def remove_batch(self, owner: str, batch_id: str) -> bool:
        found = self._batch(owner, batch_id)
        if found is None or found.record.status in OPEN:
            return False
        self._drop_batch(owner, batch_id)
        return True

    async def claim(self, lease_s: float, passed_over: Collection[str] = ()) -> BatchClaim | None:
        self._expire()
        now = self._clock()
        for _, owner in sorted((turn, owner) for owner, turn in self._turns.items()):
            waiting = [found for found in self._tenant(owner).batches.values() if found.record.status in OPEN]
            if not waiting:
                del self._turns[owner]
                continue
            first = min(waiting, key=lambda found: (found.lease_until, found.record.id))
            if owner in passed_over or first.lease_until > now:
                continue
            self._turns[owner] = max(self._turns.values()) + 1
            first.epoch += 1
            first.lost += first.held
            first.held, first.lease_until = True, now + lease_s
            return BatchClaim(owner, first.record.id, first.epoch, first.lost)
        return None

    async def renew(self, claim: BatchClaim, lease_s: float) -> Status | None:
        found = self._claimed(claim)
        if found is None:
            return None
        found.lease_until, found.held = self._clock() + lease_s, lease_s > 0
        return found.record.status

    async def record(self, claim: BatchClaim, line: int, result: LineResult) -> bool:
        found = self._claimed(claim)
        bit = 0x80 >> (line & 7)
        if found is None or found.done[line >> 3] & bit:
            return False
        self._charge(claim.owner, result.size)
        files, name = self._tenant(claim.owner).files, result_file(claim.batch_id, result.succeeded)
        file = files.setdefault(name, _File(Pieces(), 0))
        for piece in (*result.pieces, b"\n"):
            file.data.append(piece)
        file.charged += result.size
        found.done[line >> 3] |= bit
        found.completed += result.succeeded
        found.failed += not result.succeeded
        found.lost = 0
        return True

    async def done(self, claim: BatchClaim) -> bytes:
        found = self._claimed(claim)
        return bytes(found.done) if found else b""

    async def result_sizes(self, claim: BatchClaim) -> tuple[int, int]:
        if self._claimed(claim) is None:
            return 0, 0
        files = self._tenant(claim.owner).files
        output, error = (files.get(result_file(claim.batch_id, succeeded)) for succeeded in (True, False))
        return len(output.data) if output else 0, len(error.data) if error else 0

    async def save(self, claim: BatchClaim, batch: BatchRecord, files: Sequence[FileRecord] = ()) -> bool:
        found = self._claimed(claim)
        if found is None or (found.record.status == "cancelling" and batch.status == "in_progress"):
            return False
        found.record = batch
        for file in files:
            self._tenant(claim.owner).files[file.id].record = file
        if batch.status not in OPEN:
            found.expires_at = self._clock() + self._kept_s
            heapq.heappush(self._expiries, (found.expires_at, "batch", claim.owner, batch.id))
        return True

    async def cancel(self, owner: str, batch_id: str, now: int) -> bool:
        found = self._batch(owner, batch_id)
        if found is None or found.record.status not in ("validating", "in_progress"):
            return False
        found.record = cancelling(found.record, now)
        return True

    async def used(self, owner: str) -> tuple[int, int]:
        self._expire()
        return self._tenant(owner).used, self._used

    def _tenant(self, owner: str) -> _Tenant:
        return self._tenants.setdefault(owner, _Tenant())

    def _file(self, owner: str, file_id: str) -> _File | None:
        """Returns a file that is not beyond its time, and not of a batch that runs."""
        self._expire()
        found = self._tenant(owner).files.get(file_id)
        return found if found and found.record else None

    def _batch(self, owner: str, batch_id: str) -> _Batch | None:
        return self._tenant(owner).batches.get(batch_id)

    def _claimed(self, claim: BatchClaim) -> _Batch | None:
        found = self._batch(claim.owner, claim.batch_id)
        if found is None or found.epoch != claim.epoch or found.record.status not in OPEN:
            return None
        return found if found.lease_until > self._clock() else None

    def _charge(self, owner: str, amount: int) -> None:
        tenant = self._tenant(owner)
        if amount > 0 and tenant.used + amount > self._limits.file_bytes:
            raise self.refused("tenant")
        if amount > 0 and self._used + amount > self._limits.total_bytes:
            raise self.refused("total")
        tenant.used += amount
        self._used += amount

    def _drop_file(self, owner: str, file_id: str) -> bool:
        tenant = self._tenant(owner)
        found = tenant.files.pop(file_id, None)
        if found is None:
            return False
        tenant.uploads -= found.record is not None and found.record.is_upload
        self._charge(owner, -found.charged)
        return True

    def _drop_batch(self, owner: str, batch_id: str) -> None:
        found = self._tenant(owner).batches.pop(batch_id)
        for succeeded in (True, False):
            self._drop_file(owner, result_file(batch_id, succeeded))
        self._charge(owner, -found.charged)

    def _expire(self) -> None:
        """Removes what is beyond its time."""
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, kind, owner, name = heapq.heappop(self._expiries)
            if kind == "file":
                self._drop_file(owner, name)
            elif (found := self._batch(owner, name)) and found.expires_at <= now:
                self._drop_batch(owner, name)
