"""Counts what the main thread of each Python process with this folder on its PYTHONPATH does, in windows.

SIGUSR1 opens a window; SIGUSR2 closes it and writes what was counted to the folder in COUNTED, as `PID.json`. An empty
`PID` there says that a process takes these signals, `PID.open` that its window is open. The counts are of calls and
resumptions of Python functions, of the calls of C functions that these make, of tasks and timers of the event loop, of
the messages and bytes of the gRPC channels that the process opened, and of the memory blocks that a window leaves to be
collected or kept.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

FOLDER = "COUNTED"
CHANNELS = "grpc.aio._channel"
ARITIES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
EVENT_LOOP = "uvloop"
SCHEDULING = {"create_task": "tasks", "call_later": "timers", "call_at": "timers"}

_calls: defaultdict[CodeType, int] = defaultdict(int)
_c_calls: defaultdict[CodeType, int] = defaultdict(int)  # by the code that makes them
_counts = dict.fromkeys(("tasks", "timers", "messages sent", "messages received", "bytes sent", "bytes received"), 0)
_opened_with = [0]


def _record(frame: FrameType, event: str, argument: object) -> None:
    if event == "call":
        _calls[frame.f_code] += 1
    elif event == "c_call":
        _c_calls[frame.f_code] += 1


def _open(number: int, frame: FrameType | None) -> None:
    for counts in (_calls, _c_calls, _counts):
        for key in counts:
            counts[key] = 0  # type: ignore[index]
    gc.collect()
    gc.disable()
    _file(".open").touch()
    _opened_with[0] = sys.getallocatedblocks()
    sys.setprofile(_record)


def _close(number: int, frame: FrameType | None) -> None:
    sys.setprofile(None)
    blocks = sys.getallocatedblocks() - _opened_with[0]
    gc.enable()
    modules = {module.__file__: name for name, module in [*sys.modules.items()] if getattr(module, "__file__", None)}
    owners: defaultdict[str, int] = defaultdict(int)
    functions: defaultdict[str, int] = defaultdict(int)
    totals = {"calls": 0, "C calls": 0}
    for name, calls in (("calls", _calls), ("C calls", _c_calls)):
        for code, times in calls.items():
            if times and code.co_filename != __file__:
                module = modules.get(code.co_filename, code.co_filename)
                owners[module] += times
                functions[f"{module}:{code.co_qualname}"] += times
                totals[name] += times
    counts = {**totals, "blocks": blocks, **_counts}
    _file(".new").write_text(json.dumps({"counts": counts, "owners": owners, "functions": functions}))
    _file(".open").unlink()
    _file(".new").replace(_file(".json"))


def _file(suffix: str) -> Path:
    return Path(os.environ[FOLDER]) / f"{os.getpid()}{suffix}"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes the event loop and the channels when the modules that define them have been imported."""

    def __init__(self) -> None:
        self._changes = {EVENT_LOOP: _count_scheduling, CHANNELS: _count_messages}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (change := self._changes.pop(fullname, None)) is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _count_scheduling(module: Any) -> None:
    def counting(name: str) -> Callable[..., Any]:
        scheduled = getattr(module.Loop, name)

        def schedule(loop: Any, *arguments: Any, **named: Any) -> Any:
            _counts[SCHEDULING[name]] += 1
            return scheduled(loop, *arguments, **named)

        return schedule

    module.Loop = type("Loop", (module.Loop,), {name: counting(name) for name in SCHEDULING})


def _count_messages(module: Any) -> None:
    for arity in ARITIES:
        setattr(module.Channel, arity, _counting(getattr(module.Channel, arity)))


def _counting(opener: Callable[..., Any]) -> Callable[..., Any]:
    def opened(
        channel: Any,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        def serialize(message: Any) -> Any:
            data = request_serializer(message) if request_serializer else message
            _count("sent", data)
            return data

        def deserialize(data: Any) -> Any:
            _count("received", data)
            return response_deserializer(data) if response_deserializer else data

        return opener(channel, method, serialize, deserialize, *more, **named)

    return opened


def _count(direction: str, data: bytes) -> None:
    _counts[f"messages {direction}"] += 1
    _counts[f"bytes {direction}"] += len(data)


if os.environ.get(FOLDER) and any(word.startswith("services.") for word in sys.orig_argv):
    signal.signal(signal.SIGUSR1, _open)
    signal.signal(signal.SIGUSR2, _close)
    sys.meta_path.insert(0, _AfterImport())
    _file("").touch()
