"""The requests under way in vLLM: admitted in a task of their own, then fed from vLLM's output loop directly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import ErrorKind, SluiceError, internal
from services.common.tasks import TaskOwner
from services.worker.contract.generation import FinishReason
from services.worker.engines.vllm.outputs import RequestState

log = logging.getLogger(__name__)

Admit = Callable[[], Any]
"""Gives the awaitable of AsyncLLM.add_request."""


@dataclass(slots=True)
class _Entry:
    state: RequestState
    engine_id: str = ""
    cancelled: bool = False


@dataclass(slots=True)
class InflightRequests:
    """Keeps vLLM's view and ours of who is under way the same.

    vLLM hands each output to a collector that a consumer awaits: a task switch a token. Here the collector's `put` is
    ours, so a token goes from vLLM's output loop to the sink in one call.

    Args:
        tasks: owns the admissions and aborts.
        abort: AsyncLLM.abort with internal ids.
        error_of: vLLM's exceptions in our taxonomy.
    """

    tasks: TaskOwner
    abort: Callable[[list[str]], Any]
    error_of: Callable[[BaseException], SluiceError]
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return sum(entry.state.prompt_tokens for entry in self._entries.values() if not entry.state.begun)

    def begin(self, request_id: str, state: RequestState, admit: Admit) -> None:
        """Gives a request to vLLM; the flight's sink hears how it goes."""
        entry = _Entry(state)
        self._entries[request_id] = entry
        self.tasks.spawn(self._admit(request_id, entry, admit), f"vllm-admit-{request_id}")

    def cancel(self, request_id: str) -> None:
        """Ends a request at once for its sink, and as soon as possible for vLLM."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.state.end(FinishReason.CANCELLED)
        entry.cancelled = True
        self._forget(request_id, entry)
        if entry.engine_id:
            self._abort(entry)

    def end_all(self, reason: FinishReason, error: SluiceError | None = None) -> None:
        """Ends every request for its sink; vLLM is not told."""
        for request_id, entry in tuple(self._entries.items()):
            entry.state.end(reason, error)
            self._forget(request_id, entry)

    async def wait_idle(self) -> None:
        """Returns when nothing is under way."""
        while self._entries:
            self._idle.clear()
            await self._idle.wait()

    async def _admit(self, request_id: str, entry: _Entry, admit: Admit) -> None:
        """Is never cancelled by a caller who left: vLLM would be left with half a request."""
        try:
            collector = await admit()
        except Exception as error:
            cause = self.error_of(error)
            if cause.kind is ErrorKind.INTERNAL:
                log.exception("vLLM failed to take a request", extra={"request": request_id})
            entry.state.end(FinishReason.ERROR, cause)
            self._forget(request_id, entry)
            return
        entry.engine_id = collector.request_id
        collector.put = lambda output: self._receive(request_id, entry, output)
        if collector.output is not None:
            self._receive(request_id, entry, collector.output)
        if entry.cancelled:
            self._abort(entry)

    def _receive(self, request_id: str, entry: _Entry, output: Any) -> None:
        """Called from vLLM's output loop, which every request shares: whatever fails stays with this one."""
        try:
            if isinstance(output, BaseException):
                entry.state.end(FinishReason.ERROR, self.error_of(output))
            else:
                entry.state.take(output)
        except Exception:
            log.exception("an output of vLLM cannot be read", extra={"request": request_id})
            entry.state.end(FinishReason.ERROR, internal("The engine's output cannot be read."))
            self._abort(entry)
        if entry.state.ended:
            self._forget(request_id, entry)

    def _abort(self, entry: _Entry) -> None:
        engine_id, entry.engine_id = entry.engine_id, ""
        if engine_id:
            self.tasks.spawn(self._tell_vllm(engine_id), f"vllm-abort-{engine_id}")

    async def _tell_vllm(self, engine_id: str) -> None:
        try:
            await self.abort([engine_id])
        except Exception as error:
            # A dead engine holds nothing; the watch over it reports that.
            log.info("vLLM did not take an abort", extra={"reason": str(self.error_of(error))})

    def _forget(self, request_id: str, entry: _Entry) -> None:
        if self._entries.get(request_id) is entry:
            del self._entries[request_id]
        if not self._entries:
            self._idle.set()
