"""The requests whose prompts are being made: each can be given up at any moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.common.errors import SluiceError, internal
from services.common.tasks import TaskOwner
from services.worker.contract.generation import GenerateRequest

log = logging.getLogger(__name__)


class PromptPreparation:
    """Runs one task a request, from its arrival to the moment it has ids.

    Args:
        prepare: makes a request with ids of one with text or a chat.
        tasks: owner of the tasks.
    """

    def __init__(self, prepare: Callable[[GenerateRequest], Awaitable[GenerateRequest]], tasks: TaskOwner) -> None:
        self._prepare = prepare
        self._tasks = tasks
        self._running: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Requests that have no ids yet."""
        return len(self._running)

    def start(
        self,
        request: GenerateRequest,
        go_on: Callable[[GenerateRequest], None],
        fail: Callable[[SluiceError], None],
    ) -> None:
        """Prepares a request, then calls one of the two, unless it is given up before.

        Args:
            go_on: takes the prepared request; may raise SluiceError, which then is why it failed.
            fail: hears why there will be none.
        """
        task = self._tasks.spawn(self._run(request, go_on, fail), f"prepare-{request.request_id}")
        self._running[request.request_id] = task

    def give_up(self, request_id: str) -> bool:
        """Nobody waits for this request any more; False when it is not being prepared."""
        task = self._running.pop(request_id, None)
        if task is None:
            return False
        task.cancel()
        return True

    async def _run(
        self,
        request: GenerateRequest,
        go_on: Callable[[GenerateRequest], None],
        fail: Callable[[SluiceError], None],
    ) -> None:
        try:
            prepared = await self._prepare(request)
            self._running.pop(request.request_id, None)
            go_on(prepared)
        except SluiceError as error:
            self._running.pop(request.request_id, None)
            fail(error)
        except Exception:
            log.exception("a prompt could not be made", extra={"request": request.request_id})
            self._running.pop(request.request_id, None)
            fail(internal("The prompt could not be made; the worker's log has the details."))
