"""Processes of an engine's parsers: a loader that has imported the engine, and a fork of it that parses.

`main` runs in the engine's interpreter. It imports the engine, loads tokenizers, and forks for each request on its
control socket. The fork parses; when it dies, the next one starts immediately with everything loaded. Both end when the
control socket is closed.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import socket
import sys
import traceback
from dataclasses import asdict
from typing import Any, NoReturn

from services.common.stub_modules import stand_in_for_absent
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.engines import ENGINES, NOT_NEEDED, bare
from services.postprocess.parsers.engines.adapter import Engine, EngineParser
from services.postprocess.parsers.isolated.child import Streams, limit_memory, read
from services.postprocess.parsers.isolated.wire import PROGRESS, frame

REQUEST_AT_MOST = 1 << 20


def main(arguments: list[str]) -> None:
    """Runs the loader.

    Args:
        arguments: the engine; file descriptors of the control socket and of the shared progress; MiB that a fork may
            allocate.
    """
    engine_name, control_fd, progress_fd, memory_mb = arguments[0], *map(int, arguments[1:4])
    control = socket.socket(fileno=control_fd)
    progress = mmap.mmap(progress_fd, PROGRESS.size)
    os.dup2(2, 1)
    try:
        engine, error = _engine(engine_name), ""
    except Exception as failure:
        traceback.print_exc()
        engine, error = None, _missing(engine_name, failure)
    child = 0
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, REQUEST_AT_MOST, 1)
        if child:
            _kill(child)
        if not request or not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as channel:
            hello = {"error": error} if engine is None else _prepared(engine, json.loads(request))
            child = os.fork() if engine is not None else 0
            if engine is not None and not child:
                control.close()
                _serve(engine, channel, progress, memory_mb, hello)
            if engine is None:
                channel.sendall(frame(hello))


def _engine(name: str) -> Engine:
    stand_in_for_absent(*NOT_NEEDED.get(name, ()))
    module = importlib.import_module(f"services.postprocess.parsers.engines.{name}")
    engine: Engine = module.Engine()
    return engine


def _missing(name: str, error: Exception) -> str:
    if isinstance(error, ImportError):
        missing = (error.name or str(error)).split(".")[0]
        return (
            f"The parsers of {name} require the package {missing}; install sluice-llm[{name}] "
            f"({name}=={ENGINES[name].version}), or set --{name}-python to an interpreter that has it."
        )
    return f"The parsers of {name} cannot be loaded ({type(error).__name__}: {_first_line(error)}); see the log."


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]


def _prepared(engine: Engine, pairs: list[list[str]]) -> dict[str, Any]:
    """Returns the first message of a fork: the engine's parser names, and the facts of each pair of parsers.

    Unloads the models without a requested pair.
    """
    for source in set(engine.sources()) - {source for source, *_ in pairs}:
        engine.forget(source)
    return {
        "version": engine.version,
        "tool": list(engine.tool),
        "reasoning": list(engine.reasoning),
        "facts": [load(engine, *pair) for pair in pairs],
    }


def load(engine: Engine, source: str, tool: str, reasoning: str) -> dict[str, Any]:
    """Returns the facts of a pair of parsers, or an error."""
    try:
        return asdict(engine.load(source, tool, reasoning))
    except Exception as error:
        if not isinstance(error, ValueError):
            traceback.print_exc()
        return {"error": _first_line(error) or type(error).__name__}


def _serve(engine: Engine, channel: socket.socket, progress: mmap.mmap, memory_mb: int, hello: Any) -> NoReturn:
    """Processes batches in a fork until its socket is closed; never returns to the code of the loader."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        limit_memory(memory_mb)
        hello["pid"] = os.getpid()
        channel.sendall(frame(hello))
        streams = Streams(progress, lambda names, context: _build(engine, names, context))
        with channel.makefile("rb") as source:
            while (operations := read(source)) is not None:
                if operations and operations[0][0] == "load":
                    channel.sendall(frame([load(engine, *pair) for _, *pair in operations]))
                elif operations and operations[0][0] == "unload":
                    for _, source in operations:
                        engine.forget(source)
                    channel.sendall(frame([]))
                else:
                    channel.sendall(frame(streams.run(operations)))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _build(engine: Engine, names: ParserNames, context: ParserContext) -> EngineParser:
    return engine.open(bare(names.tool), bare(names.reasoning), context)


def _kill(pid: int) -> None:
    """Kills the previous fork; its pid cannot be reused before waitpid."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
