"""What a client that downloads a stored file receives when the file or its store goes away."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.types import Message, Scope

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, unavailable
from services.common.net.http.connection import ABORT_KEY
from services.gateway.admission.permit import OPEN
from services.gateway.apis.batches.endpoints import BatchEndpoints, UploadLimits
from services.gateway.apis.batches.file_content import RANGE_BYTES
from services.gateway.apis.batches.memory_store import MemoryBatchStore
from services.gateway.apis.batches.records import UPLOAD, FileRecord
from services.gateway.apis.batches.store import Limits

CONTENT = b"0123456789abcdef" * (RANGE_BYTES // 16 * 2 + 1)


class FailingStore(MemoryBatchStore):
    """Reads a number of ranges; then it is unavailable, or the file is gone."""

    def __init__(self, ranges: int, gone: bool = False) -> None:
        super().__init__(Limits(100, 1 << 26, 100, 1 << 30), 3_600, time.time)
        self._ranges = ranges
        self._gone = gone

    async def read(self, owner: str, file_id: str, start: int, size: int) -> bytes | None:
        self._ranges -= 1
        if self._ranges >= 0:
            return await super().read(owner, file_id, start, size)
        if self._gone:
            return None
        raise unavailable("The batch store is unavailable; retry.", code="store_unavailable")


async def downloaded(store: MemoryBatchStore, content: bytes) -> tuple[list[Message], bool]:
    """Returns what is sent of a file of a store, and whether the connection is aborted then."""
    now = int(time.time())
    record = FileRecord("file-1", "requests.jsonl", UPLOAD, len(content), now, now + 60)
    await store.add_file(OPEN.owner, record, content)
    sent: list[Message] = []
    aborted: list[bool] = []
    path = {"file_id": record.id}
    scope: Scope = {"type": "http", "path_params": path, ABORT_KEY: lambda: aborted.append(True)}

    async def receive() -> Message:
        await asyncio.Event().wait()  # the client stays
        raise AssertionError("cancelled before")

    async def send(message: Message) -> None:
        sent.append(message)

    limits = UploadLimits(1 << 26, Budget("batch_lines", 100, ""), 5.0, 60.0)
    endpoints = BatchEndpoints(store, cast(Any, None), cast(Any, None), lambda permit: True, limits)
    response = await endpoints.file_content(Request(scope))
    await response(scope, receive, send)
    return sent, bool(aborted)


@pytest.mark.parametrize("content", [b"", b"short", CONTENT], ids=["empty", "short", "several-ranges"])
async def test_download_of_a_file_is_its_content(content: bytes) -> None:
    sent, aborted = await downloaded(FailingStore(100), content)
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"content-length"]) == (200, str(len(content)).encode())
    assert b"".join(message["body"] for message in sent[1:]) == content
    assert not sent[-1]["more_body"]
    assert not aborted


async def test_download_from_an_unavailable_store_is_an_error_before_the_response_begins() -> None:
    with pytest.raises(SluiceError, match="unavailable") as raised:
        await downloaded(FailingStore(0), CONTENT)
    assert raised.value.kind is ErrorKind.UNAVAILABLE


async def test_download_of_a_file_that_was_deleted_meanwhile_is_not_found() -> None:
    with pytest.raises(SluiceError, match="does not exist") as raised:
        await downloaded(FailingStore(0, gone=True), CONTENT)
    assert raised.value.kind is ErrorKind.NOT_FOUND


@pytest.mark.parametrize("gone", [False, True])
async def test_download_whose_store_fails_after_its_beginning_is_cut(gone: bool) -> None:
    sent, aborted = await downloaded(FailingStore(2, gone), CONTENT)
    assert b"".join(message["body"] for message in sent[1:]) == CONTENT[: 2 * RANGE_BYTES]
    assert aborted
    assert sent[-1]["more_body"]
