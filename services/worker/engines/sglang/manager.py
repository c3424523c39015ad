"""All imports from SGLang and uses of its private parts in the worker's process; install the stubs first."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NoReturn

import sglang
import torch  # type: ignore[import-not-found,unused-ignore]
from sglang.srt.entrypoints import engine as sglang_engine
from sglang.srt.managers.io_struct import (
    EmbeddingReqInput,
    GenerateReqInput,
    LoadLoRAAdapterReqInput,
    ProfileReq,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UnloadLoRAAdapterReqInput,
)
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils import kill_process_tree

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.base.tasks import TaskOwner
from services.common.packages.engines import SGLANG
from services.worker.engines.inprocess import private_surface
from services.worker.engines.sglang import processes
from services.worker.engines.sglang.options import Flags

__all__ = [
    "CRASH_FILE",
    "RENDEZVOUS",
    "VERSION",
    "EmbeddingReqInput",
    "GenerateReqInput",
    "LoadLoRAAdapterReqInput",
    "Manager",
    "ProfileReq",
    "ReleaseMemoryOccupationReqInput",
    "ResumeMemoryOccupationReqInput",
    "UnloadLoRAAdapterReqInput",
    "has_gpu",
    "kill",
    "known_flags",
    "launch",
    "parse",
    "scheduler_info",
    "shut_down",
    "stop_watchdog",
]

IMAGES_TIMEOUT_S = 60.0
RENDEZVOUS, CRASH_FILE = processes.RENDEZVOUS, processes.CRASH_FILE
VERSION: str = sglang.__version__
logging.getLogger("sglang").setLevel(logging.WARNING)
_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_ENGINE = "sglang.srt.entrypoints.engine:Engine"
private_surface.check(
    "sglang",
    VERSION,
    (SGLANG,),
    [
        *(f"{_MANAGER}.{name}" for name in ("init_running_status", "auto_create_handle_loop", "handle_loop")),
        f"{_MANAGER}._wait_one_response",
        f"{_MANAGER}._tokenize_one_request",
        f"{_ENGINE}._launch_detokenizer_subprocesses",
        *(f"{_ENGINE}.{name}" for name in ("init_tokenizer_manager_func", "run_scheduler_process_func")),
    ],
)

Listener = Callable[[dict[str, Any]], None]


class _PushedOutputs(asyncio.Event):
    """Replaces the event that wakes a request's task for every token: calls the listener instead, and sets the event
    only when the request has ended."""

    def __init__(self, state: Any, listener: Listener) -> None:
        super().__init__()
        self._state = state
        self._listener = listener

    def set(self) -> None:
        chunks, self._state.out_list = self._state.out_list, []
        if self._state.finished and chunks:
            self._state.out_list = [chunks.pop()]
            super().set()
        for chunk in chunks:
            self._listener(chunk)


class Manager(TokenizerManager):  # type: ignore[misc]  # SGLang is not installed when types are checked
    """SGLang's frontend without its signal handlers and without ending the process on errors.

    Attributes:
        owner: Owns the background tasks; set before the first request.
        listeners: Callbacks by engine request id; each receives the request's chunks except the last one.
    """

    def init_running_status(self) -> None:
        """Initializes the state of the manager and of this subclass."""
        super().init_running_status()
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.owner: TaskOwner | None = None
        self.listeners: dict[str, Listener] = {}

    def auto_create_handle_loop(self) -> None:
        """Starts the output loop as a task of `owner`, which is notified if it fails."""
        if self.event_loop is None and self.owner is not None:
            self.event_loop = asyncio.get_running_loop()
            self.owner.spawn(self.handle_loop(), "sglang-outputs")

    async def _tokenize_one_request(self, obj: Any) -> Any:
        """Adds a deadline for images: SGLang's processor never returns when an exception ends its executor."""
        if getattr(obj, "image_data", None) is None:
            return await super()._tokenize_one_request(obj)
        try:
            async with asyncio.timeout(IMAGES_TIMEOUT_S):
                return await super()._tokenize_one_request(obj)
        except TimeoutError:
            raise SluiceError(
                ErrorKind.RESPONSE_TIMEOUT,
                f"SGLang did not process the images within {IMAGES_TIMEOUT_S:.0f} seconds; send fewer or smaller ones.",
                param="media",
            ) from None

    def _wait_one_response(self, obj: Any, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        listener = self.listeners.get(obj.rid)
        if listener is not None:
            state = self.rid_to_state[obj.rid]
            state.event = _PushedOutputs(state, listener)
            if state.out_list:
                state.event.set()
        chunks: AsyncIterator[dict[str, Any]] = super()._wait_one_response(obj, request)
        return chunks


def _make_manager(server_args: Any, port_args: Any) -> Any:
    return sglang_engine.init_tokenizer_manager(server_args, port_args, Manager)


class _Engine(sglang_engine.Engine):  # type: ignore[misc]
    init_tokenizer_manager_func = staticmethod(_make_manager)
    run_scheduler_process_func = staticmethod(processes.run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **kwargs: Any) -> tuple[list[Any], list[str]]:
        """Launches none: the postprocess service creates text."""
        return [], []


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise invalid(f"SGLang rejected its options: {message}.", param="engine_args")


def has_gpu() -> bool:
    """Returns whether torch has a usable GPU."""
    return bool(torch.cuda.is_available())


def _parser() -> _Parser:
    parser = _Parser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser


def known_flags() -> Flags:
    """Returns every flag of SGLang's server."""
    actions = _parser()._actions
    return Flags(
        names=frozenset(action.dest for action in actions),
        negatable=frozenset(action.dest for action in actions if isinstance(action, argparse.BooleanOptionalAction)),
    )


def parse(argv: list[str]) -> Any:
    """Parses a command line into ServerArgs; raises SluiceError(INVALID_ARGUMENT) for invalid options."""
    if "--config" not in argv:
        _parser().parse_args(argv)  # raises on errors, where SGLang's parser would exit
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return prepare_server_args(argv)
    except SystemExit as error:  # caused by an option in a configuration file
        raise invalid(
            "SGLang rejected its configuration file; check the options in it.", param="engine_args"
        ) from error
    finally:
        _restore(root, handlers, level)


def launch(server_args: Any) -> Any:
    """Starts SGLang's engine and its schedulers; blocks until the model is loaded.

    The calling thread must live as long as the engine: Linux kills the schedulers when the thread that started them
    exits.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return _Engine(server_args=server_args)
    finally:
        _restore(root, handlers, level)


def _restore(root: logging.Logger, handlers: list[logging.Handler], level: int) -> None:
    """Restores the root logger's handlers and level, which SGLang replaces."""
    root.handlers[:] = handlers
    root.setLevel(level)


def scheduler_info(engine: Any) -> Mapping[str, Any]:
    """Returns what the first scheduler reported at its start."""
    info: Mapping[str, Any] = engine._scheduler_init_result.scheduler_infos[0]
    return info


def stop_watchdog(manager: Any) -> None:
    """Stops SGLang's watchdog, which would kill this process when a scheduler exits."""
    if manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()


def kill(pid: int) -> None:
    """Kills a process and its descendants."""
    kill_process_tree(pid, include_parent=True)


def shut_down(engine: Any) -> None:
    """Releases the engine's sockets and shared memory in this process; call it after killing the schedulers."""
    atexit.unregister(engine.shutdown)
    manager = engine.tokenizer_manager
    for socket in (engine.send_to_rpc, manager.send_to_scheduler, manager.recv_from_detokenizer):
        if socket is not None:
            socket.close(linger=0)
    manager.load_snapshot_reader.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(shm_path_for(engine.port_args.instance_id))
