"""Processes of an engine's parsers: a fork server that has imported the engine, and a fork of it that parses.

`main` runs in the engine's interpreter. When the fork dies, the next one starts immediately with everything loaded.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import traceback
from dataclasses import asdict
from typing import Any

from services.common.base.errors import first_line
from services.common.child_rpc.child import ChildLimits, ForkedService, serve_forks
from services.common.packages.engines import NOT_NEEDED, import_failure, stand_in_for_absent
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.engine_names import bare
from services.postprocess.parsers.engines.adapter import Engine, EngineParser
from services.postprocess.parsers.isolated.child import Streams
from services.postprocess.parsers.isolated.wire import Progress, decode, encode

MAX_REASON_CHARS = 300
"""Characters of the message of an engine's parser in an error; the rest is left out."""


def main(arguments: list[str]) -> None:
    """Runs the fork server.

    Args:
        arguments: the engine; file descriptors of the control socket and of the shared progress; limits of a fork.
    """
    engine_name, control_fd, progress_fd, limits = arguments
    control = socket.socket(fileno=int(control_fd))
    os.dup2(2, 1)
    serve_forks(control, ParserService(engine_name, Progress(int(progress_fd)), ChildLimits.read(limits)))


class ParserService(ForkedService):
    """An engine's parsers.

    Args:
        name: the engine.
        progress: shows the current operation to the parent process.
        limits: of a fork.
    """

    single = True

    def __init__(self, name: str, progress: Progress, limits: ChildLimits) -> None:
        super().__init__(limits)
        self._error: dict[str, str] = {}
        try:
            self._engine = _engine(name)
        except Exception as failure:
            self._error = _unusable(name, failure)
            return
        self._streams = Streams(progress, self._build)

    def prepare(self, request: bytes) -> dict[str, Any]:
        """Returns the engine's version and the facts of each pair of parsers; unloads all other models."""
        if self._error:
            return self._error
        pairs: list[list[str]] = json.loads(request)
        for source in set(self._engine.sources()) - {source for source, *_ in pairs}:
            self._engine.forget(source)
        return {"version": self._engine.version, "facts": [load(self._engine, *pair) for pair in pairs]}

    def handle(self, request: bytes) -> bytes:
        operations = decode(request)
        kind = operations[0][0]
        if kind == "load":
            return encode([load(self._engine, *pair) for _, *pair in operations])
        if kind != "unload":
            return encode(self._streams.run(operations))
        for _, source in operations:
            self._engine.forget(source)
        return encode([])

    def _build(self, names: ParserNames, context: ParserContext) -> EngineParser:
        return self._engine.open(bare(names.tool), bare(names.reasoning), context)


def _engine(name: str) -> Engine:
    stand_in_for_absent(*NOT_NEEDED.get(name, ()))
    module = importlib.import_module(f"services.postprocess.parsers.engines.{name}")
    engine: Engine = module.Engine()
    return engine


def _unusable(name: str, error: Exception) -> dict[str, str]:
    if isinstance(error, ImportError):
        failure = import_failure(name, f"The parsers of {name}", error)
        return {"error": failure.message, "code": failure.code}
    traceback.print_exc()
    reason = f"{type(error).__name__}: {first_line(error, MAX_REASON_CHARS)}"
    return {"error": f"The parsers of {name} cannot be loaded ({reason}); see the log.", "code": "engine_version"}


def load(engine: Engine, source: str, tool: str, reasoning: str) -> dict[str, Any]:
    """Returns the facts of a pair of parsers, or an error."""
    try:
        return asdict(engine.load(source, tool, reasoning))
    except Exception as error:
        if not isinstance(error, ValueError):
            traceback.print_exc()
        return {"error": first_line(error, MAX_REASON_CHARS) or type(error).__name__}
