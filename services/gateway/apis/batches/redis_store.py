"""Stores files and batches in Redis, shared by all gateways."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Sequence
from importlib.resources import files
from typing import Any, TypeVar

from services.common.errors import unavailable
from services.common.redis.scripts import FAILURES, Script, ScriptRunner
from services.common.redis.target import Credentials, parse
from services.gateway.apis.batches.records import BatchRecord, FileRecord
from services.gateway.apis.batches.store import (
    BatchClaim,
    BatchStore,
    Limits,
    LineResult,
    NewFile,
    StoredBatch,
    cancelling,
    too_many_batches,
    too_many_files,
)

log = logging.getLogger(__name__)

_CLAIM_AT_ONCE = 16
_READ = Script("return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))")

T = TypeVar("T")


class RedisBatchStore(BatchStore):
    """See BatchStore; the limits apply to each tenant.

    Args:
        url: see `services.common.redis.target`.
        kept_s: seconds for which batches and their results are kept after their last change.
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
        self._redis = ScriptRunner(parse(url, credentials, "responses-redis-url"), timeout_s)
        self._script = Script(files("services.gateway.apis.batches").joinpath("batches.lua").read_text("utf-8"))
        self._limits = limits
        self._kept_s = kept_s
        self._prefix = f"{prefix}:batches"
        self._open = f"{prefix}:batches:open"

    async def add_file(self, owner: str, file: FileRecord, data: bytes) -> None:
        await self.files(owner)  # forgets expired ones
        seconds = max(file.expires_at - file.created_at, 1)
        added = await self._run(owner, "", file.id, "add_file", file.id, file.dump(), data, seconds, *self._limits[:2])
        if not added:
            raise too_many_files(self._limits)

    async def file(self, owner: str, file_id: str) -> FileRecord | None:
        text = await self._read("HGET", self._key(owner, "files"), file_id)
        found = FileRecord.load(text) if text else None
        return found if found and found.expires_at > time.time() else None

    async def data(self, owner: str, file_id: str) -> bytes | None:
        found: bytes | None = await self._read("GET", self._data_key(owner, file_id))
        return found

    async def files(self, owner: str) -> list[FileRecord]:
        texts = await self._read("HVALS", self._key(owner, "files"))
        found = sorted(map(FileRecord.load, texts), key=lambda file: (file.created_at, file.id))
        now = time.time()
        for file in found:
            if file.expires_at <= now:
                await self.remove_file(owner, file.id)
        return [file for file in found if file.expires_at > now]

    async def remove_file(self, owner: str, file_id: str) -> bool:
        return bool(await self._run(owner, "", file_id, "remove_file", file_id))

    async def add_batch(self, batch: BatchRecord) -> None:
        await self._forget_old(batch.owner)
        added = await self._run(
            batch.owner, batch.id, "", "add_batch", batch.id, batch.dump(), self._limits.batches, batch.created_at
        )
        if not added:
            raise too_many_batches(self._limits)
        await self._read("ZADD", self._open, 0, f"{batch.id}\n{batch.owner}")

    async def _forget_old(self, owner: str) -> None:
        """Removes ended batches from the list whose time is over; their keys expire by themselves."""
        names = await self._read("ZRANGEBYSCORE", self._key(owner, "list"), "-inf", time.time() - self._kept_s)
        for name in names:
            stored = await self.batch(owner, name.decode())
            if stored is None or stored.record.status in ("completed", "cancelled", "expired", "failed"):
                await self._read("ZREM", self._key(owner, "list"), name)

    async def batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        found = await self._read("HMGET", self._key(owner, f"batch:{batch_id}"), "record", "completed", "failed")
        return StoredBatch(BatchRecord.load(found[0]), int(found[1]), int(found[2])) if found[0] else None

    async def batches(self, owner: str) -> list[StoredBatch]:
        names = await self._read("ZRANGE", self._key(owner, "list"), 0, -1)
        found = [await self.batch(owner, name.decode()) for name in names]
        return [stored for stored in found if stored is not None]

    async def claim(self, lease_s: float) -> BatchClaim | None:
        waiting = await self._read("ZRANGEBYSCORE", self._open, "-inf", time.time(), "LIMIT", 0, _CLAIM_AT_ONCE)
        for name in waiting:
            batch_id, _, owner = name.decode().partition("\n")
            epoch = int(await self._run(owner, batch_id, "", "claim", lease_s))
            if epoch < 0:  # it has ended
                await self._read("ZREM", self._open, name)
                continue
            await self._read("ZADD", self._open, time.time() + (lease_s if epoch else 1.0), name)
            if epoch:
                return BatchClaim(owner, batch_id, epoch)
        return None

    async def renew(self, claim: BatchClaim, lease_s: float) -> bool:
        renewed = bool(await self._claimed(claim, "renew", lease_s))
        if renewed:
            await self._read("ZADD", self._open, time.time() + lease_s, f"{claim.batch_id}\n{claim.owner}")
        return renewed

    async def record(self, claim: BatchClaim, line: int, result: LineResult) -> bool:
        return bool(await self._claimed(claim, "record", line, str(int(result.succeeded)), result.text))

    async def results(self, claim: BatchClaim) -> dict[int, LineResult]:
        pairs = await self._read("HGETALL", self._key(claim.owner, f"results:{claim.batch_id}"))
        return {
            int(line): LineResult(text[:1] == b"1", text[1:])
            for line, text in zip(pairs[::2], pairs[1::2], strict=True)
        }

    async def save(self, claim: BatchClaim, batch: BatchRecord, files: Sequence[NewFile] = ()) -> bool:
        added: list[Any] = []
        for file, data in files:
            seconds = max(file.expires_at - file.created_at, 1)
            added += [file.id, file.dump(), self._data_key(claim.owner, file.id), data, seconds]
        saved = bool(await self._claimed(claim, "save", batch.dump(), batch.status, *added))
        if saved:
            for kind in ("batch", "results"):
                await self._read("EXPIRE", self._key(claim.owner, f"{kind}:{claim.batch_id}"), int(self._kept_s))
        return saved

    async def cancel(self, owner: str, batch_id: str, now: int) -> bool:
        stored = await self.batch(owner, batch_id)
        if stored is None:
            return False
        return bool(await self._run(owner, batch_id, "", "cancel", cancelling(stored.record, now).dump()))

    async def close(self) -> None:
        await self._redis.close()

    def _key(self, owner: str, rest: str) -> str:
        return f"{self._prefix}:{{{owner}}}:{rest}"

    def _data_key(self, owner: str, file_id: str) -> str:
        return self._key(owner, f"data:{file_id}")

    async def _claimed(self, claim: BatchClaim, action: str, *arguments: Any) -> Any:
        return await self._run(claim.owner, claim.batch_id, "", action, str(claim.epoch), *arguments)

    async def _run(self, owner: str, batch_id: str, file_id: str, *arguments: Any) -> Any:
        rest = ("files", "sizes", f"data:{file_id}", "list", f"batch:{batch_id}", f"results:{batch_id}")
        return await self._tried(self._redis.run(self._script, [self._key(owner, name) for name in rest], arguments))

    async def _read(self, command: str, key: str, *arguments: Any) -> Any:
        return await self._tried(self._redis.run(_READ, [key], [command, *arguments]))

    async def _tried(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except FAILURES as error:
            log.warning("batch store unavailable, Redis failed: %s", type(error).__name__)
            raise unavailable("The batch store is unavailable; try again.", code="store_unavailable") from None
