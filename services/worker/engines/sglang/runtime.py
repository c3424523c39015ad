"""Starts, monitors and stops SGLang and its processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.base.tasks import TaskOwner
from services.common.packages import model_files as models
from services.common.packages.engines import SGLANG
from services.worker.contract.engine import EngineConfig, Load
from services.worker.engines.sglang import card
from services.worker.engines.sglang.children import ChildWatch
from services.worker.engines.sglang.events import EventFeeds
from services.worker.engines.sglang.import_stubs import declare_operators, install
from services.worker.engines.sglang.options import command_line
from services.worker.engines.shared import crash_reason
from services.worker.engines.shared.download import download
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")
OnPhase = Callable[[str, float | None], None]
OnFailure = Callable[[str, BaseException], None]


class SglangRuntime:
    """Owns SGLang's schedulers, sockets and files.

    Attributes:
        sglang: The module `manager`; set by `start`.
        engine: SGLang's engine; set by `start`.
        events: Subscriptions to the engine's KV events.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._path = Path()
        self._rendezvous = ""
        # A thread that lives as long as the engine: Linux kills the schedulers with the thread that started them.
        self._thread = ThreadPoolExecutor(1, "sglang-start")
        self._unrelated_children: frozenset[int | None] = frozenset()
        self._child_watch: ChildWatch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.sglang: ModuleType = ModuleType("not started")
        self.engine: Any = None
        self.events: EventFeeds = EventFeeds(0)

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager, which accepts requests and returns tokens."""
        return self.engine.tokenizer_manager

    @property
    def bootstrap_host(self) -> str:
        """Host at which decode workers reach this prefill worker's bootstrap server."""
        return self._settings.advertise.rpartition(":")[0].strip("[]") or str(self.manager.config_value("host"))

    @property
    def bootstrap_port(self) -> int:
        """Port of the bootstrap server."""
        return int(self.manager.config_value("disaggregation_bootstrap_port"))

    async def start(self, on_phase: OnPhase, tasks: TaskOwner, on_failure: OnFailure) -> None:
        """Starts SGLang; returns when its schedulers are ready.

        Args:
            on_failure: Called when a scheduler exits.

        Raises:
            SluiceError: The reason of a failed start, in one sentence.
        """
        self._loop = asyncio.get_running_loop()
        on_phase("importing sglang", None)
        self.sglang = await self._in_thread(_import)
        await download(self._settings.spec.source, on_phase)
        on_phase("reading the model's configuration", None)
        arguments = await self._in_thread(self._arguments)
        self.events = await self._in_thread(EventFeeds, max(int(arguments.dp_size or 1), 1))
        if not arguments.disable_radix_cache:
            arguments.kv_events_config = self.events.config
        self._handle_sigquit(on_failure)
        self._unrelated_children = frozenset(child.pid for child in multiprocessing.active_children())
        os.environ[self.sglang.RENDEZVOUS] = self._rendezvous = tempfile.mkdtemp(prefix="sluice-sglang-")
        on_phase("loading the model", None)
        try:
            self.engine = await self._in_thread(self.sglang.launch, arguments)
        except SluiceError:
            raise
        except Exception as error:
            log.debug("SGLang failed to start", exc_info=True)
            reason = self._crash_reason() or _sentence(error)
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, f"SGLang failed to start: {reason}") from error
        self.manager.owner = tasks
        self.manager.auto_create_handle_loop()
        await self._in_thread(self.sglang.stop_watchdog, self.manager)
        self._child_watch = ChildWatch(self.engine.get_all_child_pids(), lambda pid: self._on_exit(pid, on_failure))

    def config(self) -> EngineConfig:
        """Returns the description of the started engine."""
        info = self.sglang.scheduler_info(self.engine)
        return card.engine_config(self._settings, self._path, self.engine, info, self.sglang.VERSION)

    def load(self) -> Sequence[Load]:
        """Returns the load by rank, from the schedulers' shared memory."""
        page = int(self.manager.config_value("page_size"))
        ranks = int(self.manager.config_value("dp_size"))
        by_rank = {snapshot.dp_rank: snapshot for snapshot in self.manager.load_snapshot_reader.read_all()}
        loads = [_load(by_rank.get(rank), page, self.events.cached_blocks(rank)) for rank in range(ranks)]
        if ranks > 1:
            return loads
        # The scheduler's snapshot is some steps old; the number of requests in flight is exact.
        in_flight = len(self.manager.rid_to_state)
        waiting = min(loads[0].waiting_requests, in_flight)
        return [replace(loads[0], running_requests=in_flight - waiting, waiting_requests=waiting)]

    async def close(self) -> None:
        """Kills the schedulers and releases all resources; may be called twice, and while SGLang is still starting."""
        if self._child_watch is not None:
            self._child_watch.close()
        for child in self._children() if self._loop is not None else []:
            self.sglang.kill(child.pid)
        if self.engine is not None:
            await asyncio.to_thread(self.sglang.shut_down, self.engine)
            self.engine = None
        if self._loop is not None:
            with contextlib.suppress(ValueError, RuntimeError):
                self._loop.remove_signal_handler(signal.SIGQUIT)
            self._loop = None
        self.events.close()
        if self._rendezvous:
            shutil.rmtree(self._rendezvous, ignore_errors=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _arguments(self) -> Any:
        settings = self._settings
        source = settings.spec.source
        folder = Path(source)
        if missing := crash_reason.missing_from(source):
            raise invalid(missing, param="model")
        self._path = models.resolve(source)
        model_path = str(folder) if folder.is_dir() else source
        argv = command_line(settings, model_path, self.sglang.known_flags(), self.sglang.has_gpu())
        return self.sglang.parse(argv)

    def _children(self) -> list[Any]:
        return [child for child in multiprocessing.active_children() if child.pid not in self._unrelated_children]

    def _handle_sigquit(self, on_failure: OnFailure) -> None:
        """Handles SIGQUIT, which a failing scheduler sends and which would otherwise kill this process."""
        assert self._loop is not None
        with contextlib.suppress(ValueError, RuntimeError):  # only the main thread can install handlers
            self._loop.add_signal_handler(signal.SIGQUIT, lambda: self._on_exit(0, on_failure))

    def _on_exit(self, pid: int, on_failure: OnFailure) -> None:
        if self.engine is None:
            return  # during the start, `launch` raises the error
        watch, self._child_watch = self._child_watch, None
        if watch is not None:
            watch.close()
            log.error("an SGLang process exited", extra={"pid": pid})
            on_failure(
                "sglang", SluiceError(ErrorKind.ENGINE_SHUTDOWN, "An SGLang process exited; retry on another worker.")
            )

    def _crash_reason(self) -> str:
        return crash_reason.read(Path(self._rendezvous, str(self.sglang.CRASH_FILE)))

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _import() -> ModuleType:
    install()
    try:
        declare_operators()
        return importlib.import_module("services.worker.engines.sglang.manager")
    except ImportError as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"SGLang cannot be imported: {error}; install sglang {SGLANG} in the worker's environment.",
        ) from error


def _load(snapshot: Any, page: int, cached_blocks: int) -> Load:
    if snapshot is None:
        return Load(cached_blocks=cached_blocks)
    return Load(
        running_requests=snapshot.num_running_reqs,
        waiting_requests=snapshot.num_waiting_reqs,
        used_blocks=-(-snapshot.num_used_tokens // page),
        cached_blocks=cached_blocks,
        prefill_tokens=snapshot.num_waiting_uncached_tokens,
        step_ms=1e3 * snapshot.num_running_reqs / snapshot.gen_throughput if snapshot.gen_throughput > 0 else 0.0,
    )


def _sentence(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
