"""The audit log: one JSON line per request, with its API key, target and outcome.

It contains no content unless configured. Writing never delays a request: lines wait in a bounded queue, and when the
disk cannot keep up they are dropped and the number of lost lines is logged in the audit log itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from pydantic import Field
from pydantic_settings import BaseSettings

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.sendable_text import sendable

log = logging.getLogger(__name__)

STANDARD_OUTPUT = "-"
MAX_WAITING = 10_000
"""Entries of the audit log that wait to be written; further ones are dropped, and counted."""
MAX_QUEUED = 16 << 20
"""Characters of the audit log that wait to be written; further lines are dropped, and counted."""
MAX_FILE_BYTES = 100 << 20
"""Bytes of the audit log's file; then it is rotated."""
MAX_KEPT_FILES = 5
"""Rotated files of the audit log; the oldest is removed."""
MAX_CONTENT = 64 << 10
"""Bytes of a request, and characters of a response, in an entry of the audit log; the rest is left out."""
_FILES = re.compile(r"""(;base64,|"data"\s*:\s*")[A-Za-z0-9+/\\=]{64,}""")
"""Base64 text of media files, which is left out of entries; "/" may be escaped in JSON."""
WRITE_EVERY_S = 0.2


class AuditSettings(BaseSettings):
    """The audit log; off by default."""

    audit_log: str = Field(
        "", description="audit log file, one JSON line per request; '-': standard output; empty: no audit log"
    )
    audit_content: bool = Field(
        False,
        description="log request bodies and responses too, 64 KiB of each; these contain your users' prompts",
    )


@dataclass(slots=True)
class AuditEntry:
    """One request's audit data, filled in while it runs.

    Attributes:
        outcome: "completed", "cancelled" (the client disconnected), or the error's code.
        workers: the workers that processed it, in order.
    """

    path: str
    with_content: bool = False
    key: str = ""
    request_id: str = ""
    model: str = ""
    workers: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    status: int = 0
    outcome: str = ""
    request: bytearray = field(default_factory=bytearray, repr=False)
    answer: list[str] = field(default_factory=list, repr=False)
    answered: int = 0
    began: float = field(default_factory=time.time)

    def worked_on_by(self, worker: str) -> None:
        """Records a worker that processes the request."""
        if worker not in self.workers:
            self.workers.append(worker)

    def hear(self, text: str) -> None:
        """Appends response text; recorded only with content, up to `MAX_CONTENT`."""
        if self.with_content and self.answered < MAX_CONTENT:
            self.answer.append(text[: MAX_CONTENT - self.answered])
            self.answered += len(text)

    def read(self, body: bytes) -> None:
        """Appends request body bytes; recorded only with content, up to `MAX_CONTENT`."""
        if self.with_content:
            self.request += body[: MAX_CONTENT - len(self.request)]

    def line(self) -> str:
        """Returns the entry as a line of JSON."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(self.began, UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "key": self.key,
            "path": self.path,
            "model": self.model,
            "workers": self.workers,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "status": self.status,
            "outcome": self.outcome or ("completed" if 200 <= self.status < 400 else "refused"),
            "duration_ms": round((time.time() - self.began) * 1000),
        }
        if self.with_content:
            request = self.request.decode("utf-8", "replace")
            fields["request"] = _FILES.sub(lambda found: f"{found[1]}…", request)
            fields["answer"] = "".join(self.answer)
        return sendable(json.dumps(fields, ensure_ascii=False))


class AuditLog:
    """Writes audit entries: run `run` as a task, and call `close` at the end.

    The file is reopened after it was moved away, and created readable by its owner only.

    Raises:
        SluiceError: FAILED_PRECONDITION when the file cannot be opened.
    """

    def __init__(self, settings: AuditSettings) -> None:
        self.with_content = settings.audit_content
        self._path = None if settings.audit_log == STANDARD_OUTPUT else Path(settings.audit_log)
        self._lines: deque[str] = deque()
        self._queued = 0  # characters
        self._has_lines = asyncio.Event()
        self._dropped = 0
        self._last_error = ""
        self._file: TextIO = sys.stdout
        try:
            self._open()
        except OSError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, f"The audit log {self._path} cannot be written: {error.strerror}."
            ) from error

    def write(self, entry: AuditEntry) -> None:
        """Queues an entry; never blocks."""
        line = entry.line()
        if len(self._lines) >= MAX_WAITING or self._queued + len(line) > MAX_QUEUED:
            self._dropped += 1
            return
        self._lines.append(line)
        self._queued += len(line)
        self._has_lines.set()

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._has_lines.wait()
            self._has_lines.clear()
            writing = asyncio.ensure_future(asyncio.to_thread(self._write, self._take()))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await writing  # otherwise its lines would be lost or written to a closed file
                raise
            await asyncio.sleep(WRITE_EVERY_S)

    def close(self) -> None:
        """Writes the remaining lines and closes the file."""
        self._flush()
        if self._path is not None:
            self._file.close()

    def _flush(self) -> None:
        self._write(self._take())

    def _take(self) -> list[str]:
        lines = list(self._lines)
        self._lines.clear()
        self._queued = 0
        return lines

    def _write(self, lines: list[str]) -> None:
        entries, dropped, self._dropped = len(lines), self._dropped, 0
        if dropped:
            lines.append(json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "lost": dropped}))
        if not lines:
            return
        try:
            self._reopen_if_moved()
            self._file.write("\n".join(lines) + "\n")
            self._file.flush()
            self._rotate_if_large()
            self._last_error = ""
        except (OSError, ValueError) as error:
            self._dropped += entries + dropped
            self._report(getattr(error, "strerror", None) or str(error))

    def _open(self) -> None:
        if self._path is not None:
            opened = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._file = os.fdopen(opened, "a", encoding="utf-8")

    def _reopen_if_moved(self) -> None:
        if self._path is None:
            return
        if not self._file.closed:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._path).st_ino == os.fstat(self._file.fileno()).st_ino:
                    return
            self._file.close()
        self._open()

    def _rotate_if_large(self) -> None:
        if self._path is None or self._file.tell() < MAX_FILE_BYTES:
            return
        self._file.close()
        for number in range(MAX_KEPT_FILES, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self._path}.{number - 1}", f"{self._path}.{number}")
        os.replace(self._path, f"{self._path}.1")
        self._open()

    def _report(self, reason: str) -> None:
        if reason != self._last_error:
            self._last_error = reason
            log.error("the audit log cannot be written, lines are lost: %s", reason)
