"""Runs batches: claims them one after the other, runs their lines, and writes their files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from services.common.errors import SluiceError
from services.gateway.apis.batches.executor import BatchExecutor
from services.gateway.apis.batches.lines import BatchLine, LineError, read_lines
from services.gateway.apis.batches.records import BatchRecord, FileRecord, Status
from services.gateway.apis.batches.store import BatchClaim, BatchStore, LineResult, NewFile

log = logging.getLogger(__name__)

LEASE_S = 30.0
RENEWALS = 3
POLL_S = 1.0
CHECK_S = 1.0
"""Longest time until a batch that is cancelled stops."""


class _Lost(Exception):
    """Another gateway has the batch, or it is being cancelled."""


class BatchRunner:
    """Works on the batches of the store.

    Args:
        concurrency: most lines that run at once.
        most_lines: lines of a batch.
        longest_line: bytes.
        file_kept_s: seconds for which output files are kept.
        clock: returns the seconds since the epoch.
    """

    def __init__(
        self,
        store: BatchStore,
        executor: BatchExecutor,
        concurrency: int,
        most_lines: int,
        longest_line: int,
        file_kept_s: float,
        clock: Callable[[], float] = time.time,
        lease_s: float = LEASE_S,
    ) -> None:
        self._store = store
        self._executor = executor
        self._concurrency = concurrency
        self._most_lines = most_lines
        self._longest_line = longest_line
        self._file_kept_s = file_kept_s
        self._clock = clock
        self._lease_s = lease_s

    async def run(self) -> None:
        """Claims and runs batches until cancelled."""
        while True:
            try:
                claim = await self._store.claim(self._lease_s)
            except SluiceError:
                claim = None
            if claim is None:
                await asyncio.sleep(POLL_S)
            else:
                await self._work_on(claim)

    async def _work_on(self, claim: BatchClaim) -> None:
        try:
            await self._advance(claim)
        except _Lost:
            log.info("batch is left to another gateway or cancelled", extra={"batch": claim.batch_id})
        except SluiceError as error:
            log.warning("batch interrupted: %s", error.message, extra={"batch": claim.batch_id})
        finally:
            with contextlib.suppress(SluiceError):
                await self._store.renew(claim, 0)

    async def _advance(self, claim: BatchClaim) -> None:
        """Takes a batch to its end."""
        stored = await self._store.batch(claim.owner, claim.batch_id)
        if stored is None:
            return
        batch = stored.record
        if batch.status == "cancelling":
            await self._finish(claim, batch, "cancelled")
            return
        data = await self._store.data(claim.owner, batch.input_file_id)
        lines = [] if data is None else await asyncio.to_thread(read_lines, data, batch.endpoint, self._longest_line)
        if problem := _problem(data, lines, self._most_lines):
            await self._save(claim, _ended(batch, "failed", self._now(), [problem]))
            return
        if batch.status == "validating":
            times = {**batch.times, "in_progress_at": self._now()}
            batch = replace(batch, status="in_progress", total=len(lines), times=times)
            await self._save(claim, batch)
        ended = await self._run_lines(claim, batch, lines)
        await self._finish(claim, batch, ended)

    async def _run_lines(self, claim: BatchClaim, batch: BatchRecord, lines: list[BatchLine | LineError]) -> Status:
        """Runs the lines that have no result; returns how the batch ends."""
        done = await self._store.results(claim)
        waiting = iter([number for number in range(len(lines)) if number not in done])
        workers = [asyncio.create_task(self._run_some(claim, batch, lines, waiting)) for _ in range(self._concurrency)]
        running = asyncio.gather(*workers)
        try:
            while True:
                finished, _ = await asyncio.wait([running], timeout=min(CHECK_S, self._lease_s / RENEWALS))
                current = await self._store.batch(claim.owner, claim.batch_id)
                if current is None or not await self._store.renew(claim, self._lease_s):
                    raise _Lost
                if current.record.status == "cancelling":
                    return "cancelled"
                if finished:
                    await running
                    return "completed"
                if self._now() >= batch.times["expires_at"]:
                    return "expired"
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run_some(
        self, claim: BatchClaim, batch: BatchRecord, lines: list[BatchLine | LineError], waiting: Any
    ) -> None:
        for number in waiting:
            line = lines[number]
            if isinstance(line, LineError):
                result = LineResult(False, line.as_result(number))
            else:
                status, body = await self._executor.run(batch.endpoint, batch.key_id, line.body)
                result = LineResult(status == 200, _result_of(number, line, status, body))
            await self._store.record(claim, number, result)

    async def _finish(self, claim: BatchClaim, batch: BatchRecord, status: Status) -> None:
        """Writes the files of the results and ends the batch, in one step."""
        results = await self._store.results(claim)
        batch = replace(batch, times={**batch.times, "finalizing_at": self._now()})
        files: list[NewFile] = []
        ids: list[str | None] = []
        for succeeded, name in ((True, "output"), (False, "error")):
            texts = [results[line].text for line in sorted(results) if results[line].succeeded is succeeded]
            file = self._file(f"{batch.id}_{name}.jsonl", texts) if texts else None
            files += [file] if file else []
            ids.append(file[0].id if file else None)
        ended = _ended(batch, status, self._now(), [])
        await self._save(claim, replace(ended, output_file_id=ids[0], error_file_id=ids[1]), files)

    def _file(self, name: str, texts: list[bytes]) -> NewFile:
        data = b"\n".join(texts) + b"\n"
        now = self._now()
        kept_until = now + int(self._file_kept_s)
        return FileRecord(f"file-{secrets.token_hex(12)}", name, "batch_output", len(data), now, kept_until), data

    async def _save(self, claim: BatchClaim, batch: BatchRecord, files: list[NewFile] | None = None) -> None:
        if not await self._store.save(claim, batch, files or []):
            raise _Lost

    def _now(self) -> int:
        return int(self._clock())


def _problem(data: bytes | None, lines: list[BatchLine | LineError], most: int) -> dict[str, Any] | None:
    """Returns why a batch cannot run at all."""
    if data is None:
        return {
            "code": "file_not_found",
            "message": "The input file was deleted.",
            "param": "input_file_id",
            "line": None,
        }
    if not lines:
        return {"code": "empty_file", "message": "The input file has no lines.", "param": "input_file_id", "line": None}
    if len(lines) > most:
        message = f"The input file has {len(lines)} lines; the limit is {most}."
        return {"code": "too_many_lines", "message": message, "param": "input_file_id", "line": None}
    return None


def _ended(batch: BatchRecord, status: Status, now: int, errors: list[dict[str, Any]]) -> BatchRecord:
    return replace(batch, status=status, times={**batch.times, f"{status}_at": now}, errors=errors)


def _result_of(number: int, line: BatchLine, status: int, body: Any) -> bytes:
    name = f"batch_req_{number}"
    response = {"status_code": status, "request_id": name, "body": body}
    return orjson.dumps({"id": name, "custom_id": line.custom_id, "response": response, "error": None})
