"""Stores files, batches and the results of their lines.

A gateway that works on a batch has a claim: a lease with an epoch. Results are accepted only with the claim of the
newest epoch and only once a line, so that a line has one result however many gateways began it.

What is stored is charged to its tenant and to the total of all tenants: a file its bytes and `PER_FILE`, a batch
`charge_of` and the results of its lines as they are appended to its output and error file. Nothing is stored that would
exceed a limit. What is removed or expires is given back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.apis.batches.records import BatchRecord, FileRecord, Status

PER_FILE = 1 << 10
"""Bytes charged for the record of an uploaded file."""
PER_BATCH = 4 << 10
"""Bytes charged for a batch beside its record: its counters, and the records of its results."""
WINDOW_S = 86_400
"""Seconds after which a batch expires."""
STORAGE_CODES = ("storage_limit_exceeded", "storage_full")
"""Codes of the errors for what would exceed the limits of a tenant, and those of all tenants."""


class BatchClaim(NamedTuple):
    """The right to work on a batch until its lease expires.

    Attributes:
        lost: earlier claims in a row whose lease expired before the batch had another result.
    """

    owner: str
    batch_id: str
    epoch: int
    lost: int = 0


class LineResult(NamedTuple):
    """The result of a line: a line of the output file, or of the error file, in pieces and without its end."""

    succeeded: bool
    pieces: Sequence[bytes]

    @property
    def size(self) -> int:
        """Bytes of the line with its end."""
        return sum(map(len, self.pieces)) + 1


class StoredBatch(NamedTuple):
    """A batch and how many of its lines have results."""

    record: BatchRecord
    completed: int
    failed: int


class Limits(NamedTuple):
    """Bounds for each tenant: uploaded files, bytes of everything together, and batches; and bytes of all tenants."""

    files: int
    file_bytes: int
    batches: int
    total_bytes: int


class BatchStore(ABC):
    """Interface of the stores; every method raises SluiceError(UNAVAILABLE) while the store is unreachable."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_tenant = Budget("stored_bytes", limits.file_bytes, "--files-kept-mb")
        self._by_all = Budget("stored_total_bytes", limits.total_bytes, "--files-kept-mb")

    @abstractmethod
    async def add_file(self, owner: str, file: FileRecord, data: bytes) -> None:
        """Stores a file; raises SluiceError TOO_LARGE or OVERLOADED, see `refused`, if it would exceed a limit."""

    @abstractmethod
    async def file(self, owner: str, file_id: str) -> FileRecord | None:
        """Returns a file's record; None if the tenant has no such file."""

    @abstractmethod
    async def read(self, owner: str, file_id: str, start: int, size: int) -> bytes | None:
        """Returns up to `size` bytes of a file from `start` on; None if the tenant has no such file."""

    @abstractmethod
    async def files(self, owner: str) -> list[FileRecord]:
        """Returns the records of a tenant's files, oldest first."""

    @abstractmethod
    async def remove_file(self, owner: str, file_id: str) -> bool:
        """Removes a file; returns whether it was there."""

    @abstractmethod
    async def add_batch(self, batch: BatchRecord, lines: int) -> None:
        """Stores a batch; raises SluiceError TOO_LARGE or OVERLOADED if it would exceed a limit.

        Args:
            lines: most lines that may have results.
        """

    @abstractmethod
    async def batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        """Returns a batch; None if the tenant has no such batch."""

    @abstractmethod
    async def batches(self, owner: str) -> list[StoredBatch]:
        """Returns a tenant's batches, oldest first."""

    @abstractmethod
    async def remove_batch(self, owner: str, batch_id: str) -> bool:
        """Removes a batch that has ended, with its results; returns whether there was one."""

    @abstractmethod
    async def claim(self, lease_s: float, passed_over: Collection[str] = ()) -> BatchClaim | None:
        """Claims a batch with work whose lease has expired, of the tenant whose last turn was the earliest.

        Returns None if there is none; what is beyond its time is removed first.

        Args:
            passed_over: tenants without a turn.
        """

    @abstractmethod
    async def renew(self, claim: BatchClaim, lease_s: float) -> Status | None:
        """Extends a claim's lease and returns the batch's status; None if the claim is lost. 0 gives the batch up."""

    @abstractmethod
    async def record(self, claim: BatchClaim, line: int, result: LineResult) -> bool:
        """Appends the result of a line to the batch's output or error file.

        Returns False if the claim is lost or the line has a result already.

        Raises:
            SluiceError: TOO_LARGE or OVERLOADED, see `refused`, if it would exceed a limit.
        """

    @abstractmethod
    async def done(self, claim: BatchClaim) -> bytes:
        """Returns a bit for each line, that of the first one highest: whether it has a result. Read by `has_result`."""

    @abstractmethod
    async def result_sizes(self, claim: BatchClaim) -> tuple[int, int]:
        """Returns the bytes of the output file and of the error file so far; 0 for both if the claim is lost."""

    @abstractmethod
    async def save(self, claim: BatchClaim, batch: BatchRecord, files: Sequence[FileRecord] = ()) -> bool:
        """Replaces a batch and makes its results files in one step; returns False if the claim is lost.

        A batch that is being cancelled is not set back to `in_progress`.

        Args:
            files: records of `result_file` ids.
        """

    @abstractmethod
    async def cancel(self, owner: str, batch_id: str, now: int) -> bool:
        """Marks a batch as being cancelled; returns whether it was validating or in progress."""

    @abstractmethod
    async def used(self, owner: str) -> tuple[int, int]:
        """Returns the bytes charged to a tenant, and to all tenants together."""

    async def close(self) -> None:  # noqa: B027 - only some stores have connections
        """Releases the store's connections."""

    def refused(self, reason: str) -> SluiceError:
        """Counts what would exceed a limit and returns its error.

        Args:
            reason: `files`, `tenant` for the bytes of a tenant, `total` for those of all tenants, or `batches`.
        """
        limits = self._limits
        if reason == "batches":
            message = f"{limits.batches} batches are stored, the limit; delete some that have ended, or retry later."
            return SluiceError(ErrorKind.OVERLOADED, message, code="too_many_batches")
        if reason == "total":
            return self._by_all.refuse(
                f"The files and results of all clients would exceed {limits.total_bytes} bytes; retry later",
                kind=ErrorKind.OVERLOADED,
                code="storage_full",
                retry_after_ms=60_000,
            )
        return self._by_tenant.refuse(
            f"The stored files, batches and results would exceed {limits.files} files or {limits.file_bytes} bytes; "
            "delete some",
            param="file",
            kind=ErrorKind.TOO_LARGE,
            code="storage_limit_exceeded",
        )


def charge_of(batch: BatchRecord, lines: int) -> int:
    """Returns the bytes charged for a batch without its results."""
    return PER_BATCH + len(batch.dump()) + lines // 8


def has_result(done: bytes, line: int) -> bool:
    """Returns whether a line's bit is set in what `BatchStore.done` returned."""
    return line >> 3 < len(done) and bool(done[line >> 3] & 0x80 >> (line & 7))


def result_file(batch_id: str, succeeded: bool) -> str:
    """Returns the id of the output file or the error file of a batch."""
    return f"file-{batch_id.removeprefix('batch_')}-{'output' if succeeded else 'error'}"


def cancelling(batch: BatchRecord, now: int) -> BatchRecord:
    """Returns a batch that is being cancelled."""
    return replace(batch, status="cancelling", times={**batch.times, "cancelling_at": now})
