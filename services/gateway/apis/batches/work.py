"""The work on one claimed batch: its lines are checked, run and recorded while the lease is renewed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import orjson

from services.common.base.budgets import Budget
from services.common.base.errors import SluiceError
from services.common.base.tasks import end_all
from services.gateway.apis.batches.executor import BatchExecutor
from services.gateway.apis.batches.lines import (
    BatchLine,
    CheckedLines,
    FileLost,
    LineError,
    Parse,
    RawLine,
    raw_lines,
    read_line,
)
from services.gateway.apis.batches.records import RESULT, BatchRecord, FileRecord, Status
from services.gateway.apis.batches.shares import FairShares
from services.gateway.apis.batches.store import (
    STORAGE_CODES,
    BatchClaim,
    BatchStore,
    LineResult,
    has_result,
    result_file,
)

LEASE_S = 30.0
RENEWALS = 3
CHECK_S = 1.0
"""Longest time until a batch that is cancelled or expires stops."""
MAX_LOST_CLAIMS = 3
"""Gateways in a row that may stop while they work on a batch; then the batch fails."""
MAX_SHOWN_ERRORS = 10
"""Broken lines that the errors of a failed batch show; further ones are left out."""
SMALL_LINE_BYTES = 64 << 10
"""Longer lines take a share of the memory of lines."""

Problem = dict[str, Any]


class ClaimLost(Exception):
    """Another gateway has the batch, or it was deleted."""


class Ending(NamedTuple):
    """How a batch ends."""

    status: Status
    errors: list[Problem]


@dataclass(frozen=True, slots=True)
class Work:
    """What the work on every batch needs.

    Attributes:
        parse: parses the JSON text of a line, within the budgets of bodies.
        lines: most lines of a batch.
        broken_lines: most lines of a batch that are no requests.
        max_line_bytes: of a line.
        concurrency: workers of a batch.
        slots: shares of the lines that run at once.
        memory: shares of the bytes of the lines that run at once, apart from short ones.
        kept_s: seconds for which results are kept.
        clock: returns the seconds since the epoch.
    """

    store: BatchStore
    executor: BatchExecutor
    parse: Parse
    lines: Budget
    broken_lines: Budget
    max_line_bytes: int
    concurrency: int
    slots: FairShares
    memory: FairShares
    kept_s: float
    clock: Callable[[], float]
    lease_s: float = LEASE_S


class ClaimedBatch:
    """The work on a batch under a claim."""

    def __init__(self, work: Work, claim: BatchClaim, batch: BatchRecord) -> None:
        self._work = work
        self._store = work.store
        self._claim = claim
        self._batch = batch
        self._reading = asyncio.Lock()
        self._unread = True

    async def run(self) -> None:
        """Takes the batch to its end; raises ClaimLost."""
        if self._claim.lost >= MAX_LOST_CLAIMS:
            message = f"{self._claim.lost} gateways in a row stopped while they worked on the batch."
            await self._end(Ending("failed", [_problem("batch_interrupted", message)]))
            return
        running = asyncio.create_task(self._advance())
        try:
            ending = await self._watched(running)
        finally:
            await end_all([running])
        await self._end(ending)

    async def _watched(self, running: asyncio.Task[Ending]) -> Ending:
        """Renews the lease until the work has ended, or the batch is cancelled or expires."""
        while True:
            status = await self._store.renew(self._claim, self._work.lease_s)
            if status is None:
                raise ClaimLost
            if status == "cancelling":
                return Ending("cancelled", [])
            if running.done():
                return await running
            if self._work.clock() >= self._batch.times["expires_at"]:
                return Ending("expired", [])
            await asyncio.wait([running], timeout=min(CHECK_S, self._work.lease_s / RENEWALS))

    async def _advance(self) -> Ending:
        """Checks the file and runs its lines."""
        try:
            checked = await self._check()
            if problems := self._problems(checked):
                return Ending("failed", problems)
            if self._batch.status == "validating":
                times = {**self._batch.times, "in_progress_at": self._now()}
                self._batch = replace(self._batch, status="in_progress", total=checked.total, times=times)
                await self._save()
            await self._run_lines(checked)
        except FileLost:
            return Ending("failed", [_problem("file_not_found", "The input file was deleted.")])
        except SluiceError as error:
            if error.code not in STORAGE_CODES:
                raise
            return Ending("failed", [_problem(error.code, error.message)])
        return Ending("completed", [])

    def _raw_lines(self) -> AsyncIterator[RawLine]:
        read = partial(self._store.read, self._claim.owner, self._batch.input_file_id)
        return raw_lines(read, self._work.max_line_bytes)

    async def _check(self) -> CheckedLines:
        checked, work = CheckedLines(), self._work
        broken = work.broken_lines.limit
        await checked.check(self._raw_lines(), self._batch.endpoint, work.max_line_bytes, broken, work.parse)
        return checked

    def _problems(self, checked: CheckedLines) -> list[Problem]:
        """Returns why a batch cannot run at all."""
        work = self._work
        if checked.excess:
            reason = f"More than {work.broken_lines.limit} lines of the input file are no requests"
            error = work.broken_lines.refuse(reason, param="input_file_id", code="too_many_broken_lines")
            shown = sorted(checked.broken)[:MAX_SHOWN_ERRORS]
            lines = [{**checked.broken[number].as_error(number), "param": None} for number in shown]
            return [_problem(error.code, error.message), *lines]
        if not checked.total:
            return [_problem("empty_file", "The input file has no lines.")]
        if checked.total > work.lines.limit:
            reason = f"The input file has {checked.total} lines; the limit is {work.lines.limit}"
            return [_problem("too_many_lines", work.lines.refuse(reason).message)]
        return []

    async def _run_lines(self, checked: CheckedLines) -> None:
        """Runs the lines that have no result; raises what the first worker that fails raises."""
        done, lines = await self._store.done(self._claim), self._raw_lines()
        workers = [asyncio.create_task(self._run_some(lines, checked, done)) for _ in range(self._work.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            await end_all(workers)

    async def _run_some(self, lines: AsyncIterator[RawLine], checked: CheckedLines, done: bytes) -> None:
        while self._unread:
            async with self._work.slots.taken(self._claim.owner), AsyncExitStack() as held:
                async with self._reading:
                    line = await self._next(lines, done)
                    if line is not None and len(line.text) > SMALL_LINE_BYTES:
                        await held.enter_async_context(self._work.memory.taken(self._claim.owner, len(line.text)))
                if line is not None:
                    broken = checked.broken.get(line.number)
                    await self._store.record(self._claim, line.number, await self._result(line, broken))

    async def _next(self, lines: AsyncIterator[RawLine], done: bytes) -> RawLine | None:
        """Returns the next line without a result; None at the end."""
        async for line in lines:
            if not has_result(done, line.number):
                return line
        self._unread = False
        return None

    async def _result(self, line: RawLine, broken: LineError | None) -> LineResult:
        work, number = self._work, line.number
        request = broken or await read_line(line, self._batch.endpoint, work.max_line_bytes, work.parse)
        if not isinstance(request, BatchLine):
            return LineResult(False, [request.as_result(number)])
        status, body = await work.executor.run(self._batch.endpoint, self._batch.key_id, request)
        name = f"batch_req_{number}"
        head = orjson.dumps({"id": name, "custom_id": request.custom_id})[:-1]
        response = b',"response":{"status_code":%d,"request_id":"%b","body":' % (status, name.encode())
        return LineResult(status == 200, [head, response, body or b"null", b'},"error":null}'])

    async def _end(self, ending: Ending) -> None:
        """Ends the batch and makes its results files, in one step."""
        if ending.status == "cancelled" and (stored := await self._store.batch(self._claim.owner, self._batch.id)):
            self._batch = stored.record
        now, ids = self._now(), dict[str, str]()
        files: list[FileRecord] = []
        sizes = await self._store.result_sizes(self._claim)
        for succeeded, name, size in zip((True, False), ("output", "error"), sizes, strict=True):
            if size:
                file_id, kept_until = result_file(self._batch.id, succeeded), now + int(self._work.kept_s)
                title = f"{self._batch.id}_{name}.jsonl"
                files.append(FileRecord(file_id, title, RESULT, size, now, kept_until))
                ids[name] = file_id
        times = {**self._batch.times, "finalizing_at": now, f"{ending.status}_at": now}
        if ending.status == "failed":
            del times["finalizing_at"]
        self._batch = replace(
            self._batch,
            status=ending.status,
            times=times,
            errors=ending.errors,
            output_file_id=ids.get("output"),
            error_file_id=ids.get("error"),
        )
        await self._save(files)

    async def _save(self, files: list[FileRecord] | None = None) -> None:
        if not await self._store.save(self._claim, self._batch, files or []):
            raise ClaimLost

    def _now(self) -> int:
        return int(self._work.clock())


def _problem(code: str, message: str) -> Problem:
    return {"code": code, "message": message, "param": "input_file_id", "line": None}
