"""Runs templates that the operator did not install in processes that can be killed.

A hostile template can loop, recurse or exhaust memory inside a single expression, where no check reaches it. So it runs
in a process with an address-space limit, an empty environment, its own alarm, and a parent that kills it. Templates of
clients share a few such processes; each model discovered from a worker has its own, so that one worker's template
neither slows another model nor sees its chats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from threading import Lock, Thread
from typing import Any, TypeVar

from services.common.budgets import Budget, BudgetPool
from services.common.errors import ErrorKind, SluiceError, overloaded, unavailable
from services.common.tasks import TaskOwner
from services.preprocess.templates import templates
from services.preprocess.templates.child_starter import START_S, Child, ChildLimits, ChildStarter
from services.preprocess.templates.lane import COMPILE_ONLY, GRACE_S, Home, Lane
from services.preprocess.templates.runner import TemplateRunner
from services.preprocess.validation import as_json

T = TypeVar("T")

MODEL_FAULT = "model_template_failed"
MAX_WAITING = 1024
CLIENTS_SETTING, MODELS_SETTING = "--template-processes", "--worker-template-processes"


class TemplateProcesses(Home):
    """The processes of foreign templates, each started on first use and replaced when killed.

    Args:
        count: number of processes for templates of clients.
        limit_s: maximum run time of a template, seconds.
        max_chars: maximum length of its output.
        memory_mb: address space of a process, MiB.
        models: maximum number of processes for templates of models; beyond it, the least recently used idle one ends.
        wait_s: maximum wait of a caller for its prompt, seconds; 0 for a multiple of the limit.
        loop: the event loop that manages them; None for a loop on a new thread.
    """

    def __init__(
        self,
        count: int,
        limit_s: float,
        max_chars: int,
        memory_mb: int,
        models: int = 16,
        wait_s: float = 0.0,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.limit_s = limit_s
        self.wait_s = wait_s or 3 * (limit_s + GRACE_S)
        self._limits = ChildLimits(limit_s, max_chars, memory_mb)
        self._count = count
        self._slots = BudgetPool("template_processes", models, MODELS_SETTING)
        self._waiting = Budget("template_processes", MAX_WAITING, CLIENTS_SETTING)
        self._given_loop = loop
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._starting = Lock()
        self._closed = False
        self._clients: list[Lane] = []
        self._models: set[Lane] = set()
        self._holding: set[Lane] = set()
        self._slot_waiters = 0
        self._starter: ChildStarter | None = None
        self.tasks = TaskOwner()

    # --- what callers use ---

    @property
    def clients(self) -> TemplateRunner:
        """Runs templates sent by clients."""
        return _ClientRunner(self)

    def of_model(self, name: str) -> TemplateRunner:
        """Returns the runner for the templates of a model discovered from a worker, in its own process."""
        return _ModelRunner(self, name)

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Runs a client's template; blocks for at most `wait_s`. Must not be called on the managing event loop.

        Raises:
            SluiceError: as `templates.render`; OVERLOADED when all processes stay busy.
        """
        return self.clients.render(source, variables)

    def wait_for(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` on the event loop, blocks this thread, and returns or raises its result."""
        if self._closed:
            raise unavailable("The service is stopping.")
        future = asyncio.run_coroutine_threadsafe(work(), self._loop())
        try:
            return future.result(self.wait_s + START_S + GRACE_S)
        except FutureTimeout:
            future.cancel()
            raise overloaded("Too many chat templates are running; retry shortly.") from None

    def on_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Callable[[], Awaitable[T]]:
        """Wraps `work` for callers on any event loop; it runs on the managing one."""

        async def run() -> T:
            if self._closed:
                raise unavailable("The service is stopping.")
            loop = self._loop()
            if asyncio.get_running_loop() is loop:
                return await work()
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))

        return run

    def close(self) -> None:
        """Ends the processes; for callers without a loop, or whose loop runs on another thread."""
        loop = self._given_loop or self._own_loop
        if self._closed or loop is None or not loop.is_running():
            self._closed = True
            return
        with suppress(FutureTimeout):
            asyncio.run_coroutine_threadsafe(self.aclose(), loop).result(START_S)
        if self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(START_S)
            if not loop.is_running():
                loop.close()

    async def aclose(self) -> None:
        """Ends the processes; must run on their loop."""
        self._closed = True
        for lane in (*self._clients, *self._models):
            lane.close()
        await self.tasks.close()
        if self._starter is not None:
            await self._starter.close()

    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._given_loop is not None:
            return self._given_loop
        with self._starting:
            if self._own_loop is None:
                self._own_loop = asyncio.new_event_loop()
                self._thread = Thread(target=self._own_loop.run_forever, name="templates", daemon=True)
                self._thread.start()
            return self._own_loop

    # --- on the loop ---

    async def of_client(self, source: str, variables: bytes) -> str:
        """Renders a client's template in the least loaded process."""
        while len(self._clients) < self._count:
            self._clients.append(Lane(self, lambda error: error, self._waiting, patient=True))
        lane = min(self._clients, key=lambda lane: lane.outstanding)
        return await lane.call(source, variables)

    def lane(self, model: str) -> Lane:
        """Returns a new lane for a model's templates, to be closed with the model."""
        lane = Lane(self, lambda error: _blamed(error, model), self._waiting)
        self._models.add(lane)
        return lane

    def drop(self, lane: Lane) -> None:
        """Closes a model's lane."""
        self._models.discard(lane)
        lane.close()

    async def open(self, lane: Lane) -> Child:
        if lane in self._models:
            await self._take_slot(lane)
        try:
            self._starter = self._starter or ChildStarter(self._limits)
            return await self._starter.child()
        except BaseException:
            self.ended(lane)
            raise

    async def _take_slot(self, lane: Lane) -> None:
        if not self._slots.try_take(1):
            idle = [held for held in self._holding if held.running and not held.outstanding]
            if idle:
                min(idle, key=lambda held: held.used_at).end()
            self._slot_waiters += 1
            try:
                async with asyncio.timeout(self.wait_s):
                    await self._slots.take(1)
            except TimeoutError:
                raise self._slots.refuse(
                    "The templates of too many models are running; retry shortly",
                    kind=ErrorKind.OVERLOADED,
                    code="overloaded",
                    retry_after_ms=1000,
                ) from None
            finally:
                self._slot_waiters -= 1
        self._holding.add(lane)

    def ended(self, lane: Lane) -> None:
        if lane in self._holding:
            self._holding.discard(lane)
            self._slots.give_back(1)

    def rests(self, lane: Lane) -> None:
        if self._slot_waiters and lane in self._holding:
            lane.end()


class _ClientRunner(TemplateRunner):
    """Implements TemplateProcesses.clients."""

    apart = True

    def __init__(self, home: TemplateProcesses) -> None:
        self._home = home

    def compile(self, source: str) -> None:
        self._home.wait_for(lambda: self._home.of_client(_check_length(source), COMPILE_ONLY))

    def render(self, source: str, variables: dict[str, Any]) -> str:
        request = as_json(variables)
        return self._home.wait_for(lambda: self._home.of_client(_check_length(source), request))

    def prepare(self, source: str, variables: dict[str, Any]) -> Callable[[], Awaitable[str]]:
        return self._home.on_loop(partial(self._home.of_client, _check_length(source), as_json(variables)))

    def close(self) -> None:
        """Does nothing: the processes are shared by all models."""


class _ModelRunner(TemplateRunner):
    """Implements TemplateProcesses.of_model."""

    apart = True

    def __init__(self, home: TemplateProcesses, name: str) -> None:
        self._home = home
        self._name = name
        self._lane: Lane | None = None

    def compile(self, source: str) -> None:
        try:
            checked = _check_length(source)
        except SluiceError as error:
            raise _blamed(error, self._name) from None
        self._home.wait_for(lambda: self._call(checked, COMPILE_ONLY))

    def render(self, source: str, variables: dict[str, Any]) -> str:
        request = as_json(variables)
        return self._home.wait_for(lambda: self._call(source, request))

    def prepare(self, source: str, variables: dict[str, Any]) -> Callable[[], Awaitable[str]]:
        return self._home.on_loop(partial(self._call, source, as_json(variables)))

    async def _call(self, source: str, variables: bytes) -> str:
        if self._lane is None:
            self._lane = self._home.lane(self._name)
        return await self._lane.call(source, variables)

    def close(self) -> None:
        async def close() -> None:
            if self._lane is not None:
                self._home.drop(self._lane)

        if self._lane is not None:
            with suppress(SluiceError):
                self._home.wait_for(close)


def _check_length(source: str) -> str:
    """Returns the template; raises SluiceError(INVALID_ARGUMENT) when it is too long."""
    if len(source) > templates.MAX_TEMPLATE_CHARS:
        raise templates.too_long_a_template()
    return source


def _blamed(error: SluiceError, model: str) -> SluiceError:
    """Converts a template's error into one of the model, unless it concerns the client's messages."""
    if error.param != "chat_template" or error.code == templates.TOO_LONG:
        return error
    reason = error.message.removeprefix("The chat template ").rstrip(".")
    return SluiceError(
        ErrorKind.FAILED_PRECONDITION,
        f"The chat template delivered by the workers of model {model} cannot be used: it {reason}.",
        param="model",
        code=MODEL_FAULT,
    )
