"""SGLang's side of the worker's process: all that is used of SGLang there, imported once the stand-ins are in place."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
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

from services.common.errors import invalid
from services.common.tasks import TaskOwner
from services.worker.engines.sglang import processes
from services.worker.engines.sglang.options import Flags

__all__ = [
    "LAST_WORDS",
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
    "shut_down",
]

RENDEZVOUS, LAST_WORDS = processes.RENDEZVOUS, processes.LAST_WORDS
VERSION: str = sglang.__version__
logging.getLogger("sglang").setLevel(logging.WARNING)
Listener = Callable[[dict[str, Any]], None]


class _PushedOutputs(asyncio.Event):
    """Takes the place of the event that wakes a request's task for every token: the listener is called instead, and
    the task sleeps until its request ends."""

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


class Manager(TokenizerManager):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """SGLang's front half: requests in, tokens out; its signal handlers and its way of ending the process are left out.

    Attributes:
        owner: of its background tasks; set before the first request.
        listeners: by the engine's request id, who hears a request's chunks before the last one.
    """

    def init_running_status(self) -> None:
        """See TokenizerManager."""
        super().init_running_status()
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.owner: TaskOwner | None = None
        self.listeners: dict[str, Listener] = {}

    def auto_create_handle_loop(self) -> None:
        """See TokenizerManager; the loop has an owner, who hears of its death."""
        if self.event_loop is None and self.owner is not None:
            self.event_loop = asyncio.get_running_loop()
            self.owner.spawn(self.handle_loop(), "sglang-outputs")

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
        """None: text is made elsewhere."""
        return [], []


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise invalid(f"SGLang's options: {message}.", param="engine_args")


def has_gpu() -> bool:
    """Whether torch can compute on one."""
    return bool(torch.cuda.is_available())


def _parser() -> _Parser:
    parser = _Parser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser


def known_flags() -> Flags:
    """Every flag of SGLang's server."""
    actions = _parser()._actions
    return Flags(
        names=frozenset(action.dest for action in actions),
        negatable=frozenset(action.dest for action in actions if isinstance(action, argparse.BooleanOptionalAction)),
    )


def parse(argv: list[str]) -> Any:
    """ServerArgs of a command line; SluiceError(INVALID_ARGUMENT) when SGLang's parser refuses it."""
    if "--config" not in argv:
        _parser().parse_args(argv)  # the same parser, which speaks in place of ending the process
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return prepare_server_args(argv)
    except SystemExit as error:  # of an option in a configuration file
        raise invalid("SGLang's parser refuses the configuration file.", param="engine_args") from error
    finally:
        _restore(root, handlers, level)


def launch(server_args: Any) -> Any:
    """SGLang's engine, its schedulers ready; blocks for as long as the model takes to load.

    The thread that calls this must live as long as the engine: Linux ends the schedulers with the thread that made
    them.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return _Engine(server_args=server_args)
    finally:
        _restore(root, handlers, level)


def _restore(root: logging.Logger, handlers: list[logging.Handler], level: int) -> None:
    """SGLang gives the whole process its own log format; the service's is put back."""
    root.handlers[:] = handlers
    root.setLevel(level)


def kill(pid: int) -> None:
    """Ends a process and those that it made."""
    kill_process_tree(pid, include_parent=True)


def shut_down(engine: Any) -> None:
    """Closes what a launched engine holds in this process; its schedulers have been ended."""
    atexit.unregister(engine.shutdown)
    manager = engine.tokenizer_manager
    for one in (engine.send_to_rpc, manager.send_to_scheduler, manager.recv_from_detokenizer):
        if one is not None:
            one.close(linger=0)
    manager.load_snapshot_reader.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(shm_path_for(engine.port_args.instance_id))
