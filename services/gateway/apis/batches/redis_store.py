"""Stores files and batches in Redis, shared by all gateways."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from importlib.resources import files
from typing import Any

from services.common.base.errors import unavailable
from services.common.redis.failures import FAILURES
from services.common.redis.scripts import Script, ScriptRunner
from services.common.redis.target import Credentials, parse
from services.gateway.apis.batches.records import BatchRecord, FileRecord, Status
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
)

log = logging.getLogger(__name__)

_STORED = b"stored"
_READS = frozenset(("read", "batches", "used", "done", "result_sizes"))
"""Actions of the script that change nothing but what has expired."""
_READ = Script("return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))")


class RedisBatchStore(BatchStore):
    """See BatchStore. All keys are in one slot of a cluster, so that each step sees what all tenants use.

    Args:
        url: see `services.common.redis.target`.
        kept_s: seconds for which ended batches and their results are kept; uploaded files have their own time.
        credentials: credentials that the URL does not contain.
        prefix: first part of every key.
        timeout_s: seconds until a Redis command times out.
    """

    def __init__(
        self,
        url: str,
        limits: Limits,
        kept_s: float,
        credentials: Credentials | None = None,
        prefix: str = "sluice",
        timeout_s: float = 5.0,
    ) -> None:
        super().__init__(limits)
        self._redis = ScriptRunner(parse(url, credentials, "responses-redis-url"), timeout_s)
        self._script = Script(files("services.gateway.apis.batches").joinpath("batches.lua").read_text("utf-8"))
        self._kept_s = kept_s
        self._base = f"{{{prefix}:batches}}"

    async def add_file(self, owner: str, file: FileRecord, data: bytes) -> None:
        charged = len(data) + PER_FILE
        self._check(await self._run("add_file", owner, file.id, file.dump(), data, charged, file.expires_at))

    async def file(self, owner: str, file_id: str) -> FileRecord | None:
        text = await self._read("HGET", f"files:{owner}", file_id)
        found = FileRecord.load(text) if text else None
        return found if found and found.expires_at > time.time() else None

    async def read(self, owner: str, file_id: str, start: int, size: int) -> bytes | None:
        found: bytes | None = await self._run("read", owner, file_id, start, start + size - 1)
        return found

    async def files(self, owner: str) -> list[FileRecord]:
        now = time.time()
        texts = await self._read("HVALS", f"files:{owner}")
        found = sorted(map(FileRecord.load, texts), key=lambda file: (file.created_at, file.id))
        return [file for file in found if file.expires_at > now]

    async def remove_file(self, owner: str, file_id: str) -> bool:
        return bool(await self._run("remove_file", owner, file_id))

    async def add_batch(self, batch: BatchRecord, lines: int) -> None:
        seconds = WINDOW_S + self._kept_s
        arguments = (batch.id, batch.dump(), batch.created_at, charge_of(batch, lines), seconds)
        self._check(await self._run("add_batch", batch.owner, *arguments))

    async def batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        return _stored(await self._read("HMGET", f"batch:{owner}:{batch_id}", "record", "completed", "failed"))

    async def batches(self, owner: str) -> list[StoredBatch]:
        found = [_stored(fields) for fields in await self._run("batches", owner)]
        return [stored for stored in found if stored is not None]

    async def remove_batch(self, owner: str, batch_id: str) -> bool:
        return bool(await self._run("remove_batch", owner, batch_id))

    async def claim(self, lease_s: float, passed_over: Collection[str] = ()) -> BatchClaim | None:
        found = await self._run("claim", "", lease_s, *passed_over)
        if found is None:
            return None
        owner, batch_id, epoch, lost = found
        return BatchClaim(owner.decode(), batch_id.decode(), int(epoch), int(lost))

    async def renew(self, claim: BatchClaim, lease_s: float) -> Status | None:
        status = await self._claimed("renew", claim, lease_s)
        return status.decode() if status else None

    async def record(self, claim: BatchClaim, line: int, result: LineResult) -> bool:
        pieces = (*result.pieces, b"\n")
        reason = await self._claimed("record", claim, line, int(result.succeeded), result.size, *pieces)
        if reason is not None:
            self._check(reason)
        return reason is not None

    async def done(self, claim: BatchClaim) -> bytes:
        found: bytes | None = await self._claimed("done", claim)
        return found or b""

    async def result_sizes(self, claim: BatchClaim) -> tuple[int, int]:
        output, error = await self._claimed("result_sizes", claim) or (0, 0)
        return output, error

    async def save(self, claim: BatchClaim, batch: BatchRecord, files: Sequence[FileRecord] = ()) -> bool:
        records = [part for file in files for part in (file.id, file.dump())]
        return await self._claimed("save", claim, batch.dump(), batch.status, *records) is not None

    async def cancel(self, owner: str, batch_id: str, now: int) -> bool:
        stored = await self.batch(owner, batch_id)
        if stored is None:
            return False
        return bool(await self._run("cancel", owner, batch_id, cancelling(stored.record, now).dump()))

    async def used(self, owner: str) -> tuple[int, int]:
        by_tenant, by_all = await self._run("used", owner)
        return by_tenant, by_all

    async def close(self) -> None:
        await self._redis.close()

    def _check(self, reason: bytes) -> None:
        if reason != _STORED:
            raise self.refused(reason.decode())

    async def _claimed(self, action: str, claim: BatchClaim, *arguments: Any) -> Any:
        return await self._run(action, claim.owner, claim.batch_id, claim.epoch, *arguments)

    async def _run(self, action: str, owner: str, *arguments: Any) -> Any:
        head = (action, owner, *self._limits, self._kept_s)
        return await self._evaluate(self._script, self._base, [*head, *arguments], action in _READS)

    async def _read(self, command: str, rest: str, *arguments: Any) -> Any:
        return await self._evaluate(_READ, f"{self._base}:{rest}", [command, *arguments], reads=True)

    async def _evaluate(self, script: Script, key: str, arguments: Sequence[Any], reads: bool) -> Any:
        try:
            return await self._redis.run(script, [key], arguments, reads)
        except FAILURES as error:
            log.warning("batch store unavailable, Redis failed: %s", type(error).__name__)
            raise unavailable("The batch store is unavailable; try again.", code="store_unavailable") from None


def _stored(fields: Sequence[bytes | None]) -> StoredBatch | None:
    record, completed, failed = fields
    return StoredBatch(BatchRecord.load(record), int(completed or 0), int(failed or 0)) if record else None
