"""Stores files, batches and the results of their lines.

A gateway that works on a batch has a claim: a lease with an epoch. Results are accepted only with the claim of the
newest epoch and only once a line, so that a line has one result however many gateways began it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from services.common.errors import ErrorKind, SluiceError
from services.gateway.apis.batches.records import OPEN, BatchRecord, FileRecord


class BatchClaim(NamedTuple):
    """The right to work on a batch until its lease expires."""

    owner: str
    batch_id: str
    epoch: int


class LineResult(NamedTuple):
    """The result of a line: a line of the output file, or of the error file."""

    succeeded: bool
    text: bytes


class StoredBatch(NamedTuple):
    """A batch and how many of its lines have results."""

    record: BatchRecord
    completed: int
    failed: int


class Limits(NamedTuple):
    """Bounds for each tenant: files, their bytes together, and batches."""

    files: int
    file_bytes: int
    batches: int


NewFile = tuple[FileRecord, bytes]


class BatchStore(ABC):
    """Interface of the stores; every method raises SluiceError(UNAVAILABLE) while the store is unreachable."""

    @abstractmethod
    async def add_file(self, owner: str, file: FileRecord, data: bytes) -> None:
        """Stores a file; raises SluiceError(TOO_LARGE) if the tenant's files exceed a limit."""

    @abstractmethod
    async def file(self, owner: str, file_id: str) -> FileRecord | None:
        """Returns a file's record; None if the tenant has no such file."""

    @abstractmethod
    async def data(self, owner: str, file_id: str) -> bytes | None:
        """Returns a file's content; None if the tenant has no such file."""

    @abstractmethod
    async def files(self, owner: str) -> list[FileRecord]:
        """Returns the records of a tenant's files, oldest first."""

    @abstractmethod
    async def remove_file(self, owner: str, file_id: str) -> bool:
        """Removes a file; returns whether it was there."""

    @abstractmethod
    async def add_batch(self, batch: BatchRecord) -> None:
        """Stores a batch; raises SluiceError(OVERLOADED) if the tenant has too many."""

    @abstractmethod
    async def batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        """Returns a batch; None if the tenant has no such batch."""

    @abstractmethod
    async def batches(self, owner: str) -> list[StoredBatch]:
        """Returns a tenant's batches, oldest first."""

    @abstractmethod
    async def claim(self, lease_s: float) -> BatchClaim | None:
        """Claims a batch with work whose lease has expired; None if there is none."""

    @abstractmethod
    async def renew(self, claim: BatchClaim, lease_s: float) -> bool:
        """Extends a claim's lease; returns False if the claim is lost. 0 gives the batch up."""

    @abstractmethod
    async def record(self, claim: BatchClaim, line: int, result: LineResult) -> bool:
        """Stores the result of a line; returns False if the claim is lost or the line has a result already."""

    @abstractmethod
    async def results(self, claim: BatchClaim) -> dict[int, LineResult]:
        """Returns the results by line."""

    @abstractmethod
    async def save(self, claim: BatchClaim, batch: BatchRecord, files: Sequence[NewFile] = ()) -> bool:
        """Replaces a batch and adds files in one step; returns False if the claim is lost.

        A batch that is being cancelled is not set back to `in_progress`.
        """

    @abstractmethod
    async def cancel(self, owner: str, batch_id: str, now: int) -> bool:
        """Marks a batch as being cancelled; returns whether it was validating or in progress."""

    async def close(self) -> None:  # noqa: B027 - only some stores have connections
        """Releases the store's connections."""


def too_many_files(limits: Limits) -> SluiceError:
    """Returns the error of a file too many."""
    return SluiceError(
        ErrorKind.TOO_LARGE,
        f"The stored files would exceed {limits.files} files or {limits.file_bytes} bytes; delete some.",
        param="file",
        code="storage_limit_exceeded",
    )


def too_many_batches(limits: Limits) -> SluiceError:
    """Returns the error of a batch too many."""
    return SluiceError(
        ErrorKind.OVERLOADED, f"{limits.batches} batches are stored, the limit; retry later.", code="too_many_batches"
    )


@dataclass(slots=True)
class _Kept:
    record: BatchRecord
    results: dict[int, LineResult] = field(default_factory=dict)
    epoch: int = 0
    lease_until: float = 0.0

    @property
    def stored(self) -> StoredBatch:
        succeeded = sum(result.succeeded for result in self.results.values())
        return StoredBatch(self.record, succeeded, len(self.results) - succeeded)


class MemoryBatchStore(BatchStore):
    """Keeps everything in this process; files and ended batches expire.

    Args:
        kept_s: seconds for which ended batches are kept; files have their own time.
        clock: returns the seconds since the epoch.
    """

    def __init__(self, limits: Limits, kept_s: float, clock: Callable[[], float] = time.time) -> None:
        self._limits = limits
        self._kept_s = kept_s
        self._clock = clock
        self._files: dict[str, dict[str, NewFile]] = {}
        self._batches: dict[str, dict[str, _Kept]] = {}

    async def add_file(self, owner: str, file: FileRecord, data: bytes) -> None:
        files = self._current(owner)
        size = sum(len(content) for _, content in files.values())
        if len(files) >= self._limits.files or size + len(data) > self._limits.file_bytes:
            raise too_many_files(self._limits)
        self._files.setdefault(owner, {})[file.id] = (file, data)

    def _current(self, owner: str) -> dict[str, NewFile]:
        files, now = self._files.get(owner, {}), self._clock()
        for name in [name for name, (file, _) in files.items() if file.expires_at <= now]:
            del files[name]
        return files

    async def file(self, owner: str, file_id: str) -> FileRecord | None:
        found = self._current(owner).get(file_id)
        return found[0] if found else None

    async def data(self, owner: str, file_id: str) -> bytes | None:
        found = self._current(owner).get(file_id)
        return found[1] if found else None

    async def files(self, owner: str) -> list[FileRecord]:
        return [file for file, _ in self._current(owner).values()]

    async def remove_file(self, owner: str, file_id: str) -> bool:
        return self._current(owner).pop(file_id, None) is not None

    async def add_batch(self, batch: BatchRecord) -> None:
        batches, oldest = self._batches.setdefault(batch.owner, {}), self._clock() - self._kept_s
        for name in [
            name for name, kept in batches.items() if kept.record.status not in OPEN and kept.record.created_at < oldest
        ]:
            del batches[name]
        if len(batches) >= self._limits.batches:
            raise too_many_batches(self._limits)
        batches[batch.id] = _Kept(batch)

    async def batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        kept = self._batches.get(owner, {}).get(batch_id)
        return kept.stored if kept else None

    async def batches(self, owner: str) -> list[StoredBatch]:
        return [kept.stored for kept in self._batches.get(owner, {}).values()]

    async def claim(self, lease_s: float) -> BatchClaim | None:
        now = self._clock()
        waiting = [
            kept
            for batches in self._batches.values()
            for kept in batches.values()
            if kept.record.status in OPEN and kept.lease_until <= now
        ]
        if not waiting:
            return None
        first = min(waiting, key=lambda kept: kept.lease_until)
        first.epoch += 1
        first.lease_until = now + lease_s
        return BatchClaim(first.record.owner, first.record.id, first.epoch)

    async def renew(self, claim: BatchClaim, lease_s: float) -> bool:
        kept = self._claimed(claim)
        if kept is not None:
            kept.lease_until = self._clock() + lease_s
        return kept is not None

    async def record(self, claim: BatchClaim, line: int, result: LineResult) -> bool:
        kept = self._claimed(claim)
        if kept is None or line in kept.results:
            return False
        kept.results[line] = result
        return True

    async def results(self, claim: BatchClaim) -> dict[int, LineResult]:
        kept = self._claimed(claim)
        return dict(kept.results) if kept else {}

    async def save(self, claim: BatchClaim, batch: BatchRecord, files: Sequence[NewFile] = ()) -> bool:
        kept = self._claimed(claim)
        if kept is None or (kept.record.status == "cancelling" and batch.status == "in_progress"):
            return False
        kept.record = batch
        for file, data in files:
            self._files.setdefault(claim.owner, {})[file.id] = (file, data)
        return True

    async def cancel(self, owner: str, batch_id: str, now: int) -> bool:
        kept = self._batches.get(owner, {}).get(batch_id)
        if kept is None or kept.record.status not in ("validating", "in_progress"):
            return False
        kept.record = cancelling(kept.record, now)
        return True

    def _claimed(self, claim: BatchClaim) -> _Kept | None:
        kept = self._batches.get(claim.owner, {}).get(claim.batch_id)
        return kept if kept and kept.epoch == claim.epoch and kept.lease_until > self._clock() else None


def cancelling(batch: BatchRecord, now: int) -> BatchRecord:
    """Returns a batch that is being cancelled."""
    return replace(batch, status="cancelling", times={**batch.times, "cancelling_at": now})
