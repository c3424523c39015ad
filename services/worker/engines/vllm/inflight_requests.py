"""Tracks the requests in vLLM: each is added in its own task, then receives outputs from vLLM's output loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, internal
from services.common.base.tasks import TaskOwner
from services.worker.contract.generation import FinishReason
from services.worker.engines.vllm import library
from services.worker.engines.vllm.outputs import RequestState

log = logging.getLogger(__name__)

Admit = Callable[[], Any]
"""Calls AsyncLLM.add_request and returns its awaitable."""


@dataclass(slots=True)
class _Entry:
    state: RequestState
    engine_id: str = ""
    cancelled: bool = False


@dataclass(slots=True)
class InflightRequests:
    """Adds requests to vLLM, routes its outputs to their states, and aborts cancelled requests.

    vLLM puts each output into a collector that a consumer awaits, which costs a task switch per token. Replacing the
    collector's `put` delivers a token from vLLM's output loop to the sink in one call.

    Args:
        tasks: Owns the tasks that add and abort requests.
        abort: AsyncLLM.abort with internal ids.
        error_of: Converts vLLM's exceptions into SluiceError.
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
        """Prompt tokens of the requests that have not produced a token yet."""
        return sum(entry.state.prompt_tokens for entry in self._entries.values() if not entry.state.begun)

    def begin(self, request_id: str, state: RequestState, admit: Admit) -> None:
        """Adds a request to vLLM; results and errors go to the state's sink."""
        entry = _Entry(state)
        self._entries[request_id] = entry
        self.tasks.spawn(self._admit(request_id, entry, admit), f"vllm-admit-{request_id}")

    def cancel(self, request_id: str) -> None:
        """Ends a request for its sink immediately, and in vLLM as soon as possible."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.state.end(FinishReason.CANCELLED)
        entry.cancelled = True
        self._forget(request_id, entry)
        self._abort(entry)

    def end_all(self, reason: FinishReason, error: SluiceError | None = None) -> None:
        """Ends every request for its sink without aborting it in vLLM."""
        for request_id, entry in tuple(self._entries.items()):
            entry.state.end(reason, error)
            self._forget(request_id, entry)

    async def wait_idle(self) -> None:
        """Waits until no request is in flight."""
        while self._entries:
            self._idle.clear()
            await self._idle.wait()

    async def _admit(self, request_id: str, entry: _Entry, admit: Admit) -> None:
        """Adds a request; never cancelled when the caller disconnects, which could leave a partial request in vLLM."""
        try:
            collector = await admit()
        except Exception as error:
            cause = self.error_of(error)
            if cause.kind is ErrorKind.INTERNAL:
                log.exception("vLLM failed to add a request", extra={"request": request_id})
            entry.state.end(FinishReason.ERROR, cause)
            self._forget(request_id, entry)
            return
        entry.engine_id = collector.request_id
        library.push_outputs(collector, lambda output: self._receive(request_id, entry, output))
        if entry.cancelled:
            self._abort(entry)

    def _receive(self, request_id: str, entry: _Entry, output: Any) -> None:
        """Handles an output; exceptions end only this request, because all requests share vLLM's output loop."""
        try:
            if isinstance(output, BaseException):
                entry.state.end(FinishReason.ERROR, self.error_of(output))
            else:
                entry.state.take(output)
        except Exception:
            log.exception("failed to process an output of vLLM", extra={"request": request_id})
            entry.state.end(FinishReason.ERROR, internal("The engine returned an invalid output."))
            self._abort(entry)
        if entry.state.ended:
            self._forget(request_id, entry)

    def _abort(self, entry: _Entry) -> None:
        engine_id, entry.engine_id = entry.engine_id, ""
        if engine_id:
            self.tasks.spawn(self._abort_in_vllm(engine_id), f"vllm-abort-{engine_id}")

    async def _abort_in_vllm(self, engine_id: str) -> None:
        try:
            await self.abort([engine_id])
        except Exception as error:
            # An exited engine has no requests to abort; its monitor reports the exit.
            log.info("vLLM failed to abort a request", extra={"reason": str(self.error_of(error))})

    def _forget(self, request_id: str, entry: _Entry) -> None:
        if self._entries.get(request_id) is entry:
            del self._entries[request_id]
        if not self._entries:
            self._idle.set()
