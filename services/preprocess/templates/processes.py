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
from typing import Any, TypeVar

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, overloaded
from services.common.child_rpc.child import ChildLimits
from services.common.child_rpc.fork_server import ForkServer
from services.common.child_rpc.lane import stopping
from services.common.child_rpc.pool import ForkPool
from services.common.child_rpc.process import background_loop, bare_environment, module_command
from services.preprocess.templates import templates
from services.preprocess.templates.capabilities import TemplateCapabilities
from services.preprocess.templates.child import job
from services.preprocess.templates.fair_calls import origin
from services.preprocess.templates.lane import COMPILE_ONLY, GRACE_S, START_S, LaneSlots, TemplateLane
from services.preprocess.templates.runner import TemplateRunner
from services.preprocess.templates.templates import RenderedText

T = TypeVar("T")

MODEL_FAULT = "model_template_failed"
MAX_WAITING = 1024
"""Chats that wait for a process of their templates; further ones are refused, budget `template_processes`."""
FILES = 16
MAX_MODELS = 16
"""Processes for templates of models discovered from workers, one a model; others wait until one is idle."""


class TemplateProcesses:
    """The processes of foreign templates, each started on first use and replaced when killed.

    Args:
        count: number of processes for templates of clients.
        limit_s: maximum run time of a template, seconds.
        max_chars: maximum length of its output.
        memory_mb: address space of a process, MiB.
        models: maximum number of processes for templates of models; beyond it, the least recently used idle one ends.
        wait_s: maximum wait of a caller for its prompt, seconds; 0 for a multiple of the limit.
        loop: the event loop that manages them; None for that of all such callers.
    """

    def __init__(
        self,
        count: int,
        limit_s: float,
        max_chars: int,
        memory_mb: int,
        models: int = MAX_MODELS,
        wait_s: float = 0.0,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.limit_s = limit_s
        self.wait_s = wait_s or 3 * (limit_s + GRACE_S)
        limits = ChildLimits(limit_s, memory_mb, absolute=True, files=FILES)
        server = ForkServer(
            lambda control: module_command("services.preprocess.templates.child", control, limits, max_chars),
            max_frame_bytes=4 * max_chars + (1 << 16),
            start_s=START_S,
            quiet=True,
            environment=bare_environment(),
        )
        self._pool = ForkPool[RenderedText](server, limits, "chat templates")
        self._count = count
        self._slots = LaneSlots(models, self.wait_s)
        self._waiting = Budget("template_processes", MAX_WAITING, "")
        self._given_loop = loop
        self._closed = False
        self._clients: list[TemplateLane] = []
        self._models: set[TemplateLane] = set()

    # --- what callers use ---

    @property
    def clients(self) -> TemplateRunner:
        """Runs templates sent by clients."""
        return _Runner(self, self.of_client)

    def prober(self) -> ModelRunner:
        """Returns a runner of probes, in a process of its own; close it after use."""
        return ModelRunner(self, "probe")

    def of_model(self, name: str) -> TemplateRunner:
        """Returns the runner for the templates of a model discovered from a worker, in its own process."""
        return ModelRunner(self, name)

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Runs a client's template; blocks for at most `wait_s`. Must not be called on the managing event loop.

        Raises:
            SluiceError: as `templates.render`; OVERLOADED when all processes stay busy.
        """
        return self.clients.render(source, variables).text

    def wait_for(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` on the event loop, blocks this thread, and returns or raises its result."""
        if self._closed:
            raise stopping()
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
                raise stopping()
            loop = self._loop()
            if asyncio.get_running_loop() is loop:
                return await work()
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))

        return run

    def close(self) -> None:
        """Ends the processes; for callers without a loop, or whose loop runs on another thread."""
        loop = self._loop()
        if self._closed or not loop.is_running():
            self._closed = True
            return
        with suppress(FutureTimeout):
            asyncio.run_coroutine_threadsafe(self.aclose(), loop).result(START_S)

    async def aclose(self) -> None:
        """Ends the processes; must run on their loop."""
        self._closed = True
        for lane in (*self._clients, *self._models):
            lane.stop()
        await self._pool.close()

    def _loop(self) -> asyncio.AbstractEventLoop:
        return self._given_loop or background_loop()

    # --- on the loop ---

    async def of_client(self, source: str, job: bytes, origin: str = "") -> RenderedText:
        """Renders a client's template in the least loaded process; the templates of different origins take turns."""
        while len(self._clients) < self._count:
            self._clients.append(TemplateLane(self._pool, self._waiting, self.wait_s))
        lane = min(self._clients, key=lambda lane: lane.outstanding)
        return await lane.call(source, job, origin)

    def lane(self, model: str) -> TemplateLane:
        """Returns a new lane for a model's templates, to be closed with the model."""
        blame = partial(_blamed, model)
        lane = TemplateLane(self._pool, self._waiting, self.wait_s, blame, self._slots)
        self._models.add(lane)
        return lane

    async def drop(self, lane: TemplateLane) -> None:
        """Closes a model's lane, and the fork server with the last lane; it starts again on the next use."""
        self._models.discard(lane)
        lane.stop()
        if not self._models and not self._clients:
            await self._pool.server.close()


class _Runner(TemplateRunner):
    """Runs templates in these processes; `call` renders one on their loop."""

    apart = True

    def __init__(
        self, home: TemplateProcesses, call: Callable[[str, bytes, str], Coroutine[Any, Any, RenderedText]]
    ) -> None:
        self._home = home
        self._call = call

    def compile(self, source: str) -> None:
        self._home.wait_for(partial(self._call, source, COMPILE_ONLY, origin.get()))

    def render(self, source: str, variables: dict[str, Any], known: TemplateCapabilities | None = None) -> RenderedText:
        return self._home.wait_for(partial(self._call, source, job(variables, known), origin.get()))

    def probe(self, source: str, variables: dict[str, Any]) -> str:
        """Runs a template on a conversation as it is; raises SluiceError as `render`."""
        return self._home.wait_for(partial(self._call, source, job(variables, None, True), origin.get())).text

    def prepare(
        self, source: str, variables: dict[str, Any], known: TemplateCapabilities | None = None
    ) -> Callable[[], Awaitable[RenderedText]]:
        return self._home.on_loop(partial(self._call, source, job(variables, known), origin.get()))

    def close(self) -> None:
        """Does nothing: the processes are shared by all models."""


class ModelRunner(_Runner):
    """Runs the templates of one origin in a process of its own, started with the first of them."""

    def __init__(self, home: TemplateProcesses, name: str) -> None:
        super().__init__(home, self._in_lane)
        self._name = name
        self._lane: TemplateLane | None = None

    async def _in_lane(self, source: str, job: bytes, origin: str) -> RenderedText:
        if self._lane is None:
            self._lane = self._home.lane(self._name)
        return await self._lane.call(source, job, origin)

    def close(self) -> None:
        async def close() -> None:
            if self._lane is not None:
                await self._home.drop(self._lane)

        if self._lane is not None:
            with suppress(SluiceError):
                self._home.wait_for(close)


def _blamed(model: str, error: SluiceError) -> SluiceError:
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
