"""Cancellable preparation of requests whose prompts the worker tokenizes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.common.base.errors import SluiceError, internal
from services.common.base.tasks import TaskOwner
from services.worker.contract.generation import GenerateRequest

log = logging.getLogger(__name__)


class PromptPreparation:
    """Runs one task per request, from its arrival until it has token ids.

    Args:
        prepare: replaces the text or chat of a request by token ids.
        tasks: owner of the tasks.
    """

    def __init__(self, prepare: Callable[[GenerateRequest], Awaitable[GenerateRequest]], tasks: TaskOwner) -> None:
        self._prepare = prepare
        self._tasks = tasks
        self._running: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Number of requests without token ids."""
        return len(self._running)

    def start(
        self,
        request: GenerateRequest,
        on_prepared: Callable[[GenerateRequest], None],
        fail: Callable[[SluiceError], None],
    ) -> None:
        """Prepares a request, then calls exactly one of the callbacks, unless it is cancelled before.

        Args:
            on_prepared: called with the prepared request; a SluiceError it raises is passed to `fail`.
            fail: called with the error.
        """
        task = self._tasks.spawn(self._run(request, on_prepared, fail), f"prepare-{request.request_id}")
        self._running[request.request_id] = task

    def give_up(self, request_id: str) -> bool:
        """Cancels the preparation of a request; returns False when it is not being prepared."""
        task = self._running.pop(request_id, None)
        if task is None:
            return False
        task.cancel()
        return True

    async def _run(
        self,
        request: GenerateRequest,
        on_prepared: Callable[[GenerateRequest], None],
        fail: Callable[[SluiceError], None],
    ) -> None:
        try:
            prepared = await self._prepare(request)
            self._running.pop(request.request_id, None)
            on_prepared(prepared)
        except SluiceError as error:
            self._running.pop(request.request_id, None)
            fail(error)
        except Exception:
            log.exception("prompt preparation failed", extra={"request": request.request_id})
            self._running.pop(request.request_id, None)
            fail(internal("The worker failed to tokenize the prompt; see its log."))
