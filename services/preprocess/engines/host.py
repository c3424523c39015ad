"""The process that runs an engine's tokenizer: serves calls from its standard input until that is closed.

A frame is a length (uint32, little-endian) and that many bytes of JSON. The first frame it writes is the tokenizer's
facts or an error. A request frame is a list of [id, verb, argument]; a reply frame a list of [id, result, error], in
order.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

from services.common.errors import ErrorKind, SluiceError
from services.common.stub_modules import stand_in_for_absent
from services.preprocess.engines import NOT_NEEDED, TESTED_VERSIONS
from services.preprocess.engines.tokenizer import EngineTokenizer, answer, error_form

LENGTH = Struct("<I")
LOAD_FACTOR = 2
"""Memory limit while loading, as a multiple of the limit afterwards."""


def main(arguments: list[str]) -> None:
    """Runs the process.

    Args:
        arguments: the engine; the tokenizer's path; seconds after which a hanging call ends the process; MiB it may
            allocate after loading the tokenizer; a folder for temporary files, which the parent removes because this
            process may be killed; "foreign" if the files came from a worker.
    """
    engine, path, limit_s, memory_mb = arguments[0], Path(arguments[1]), float(arguments[2]), int(arguments[3])
    tempfile.tempdir, foreign = arguments[4], "foreign" in arguments[5:]
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of libraries must not mix with replies
    try:
        tokenizer = _load(engine, path, memory_mb if foreign else 0)
    except Exception as error:
        _write(replies, {"error": _load_error(engine, error)})
        return
    _bound_memory(memory_mb)
    _write(replies, {"facts": asdict(tokenizer.facts)})
    _serve(tokenizer, sys.stdin.buffer, replies, limit_s)


def _load(engine: str, path: Path, memory_mb: int) -> EngineTokenizer:
    """Loads the tokenizer; `memory_mb` limits its memory beyond the engine's own code, 0 for no limit."""
    stand_in_for_absent(*NOT_NEEDED.get(engine, ()))
    module = importlib.import_module(f"services.preprocess.engines.{engine}")
    if memory_mb:
        address_space = _address_space()
        # Only the soft limit: it changes after the tokenizer is loaded.
        resource.setrlimit(
            resource.RLIMIT_AS, (address_space + LOAD_FACTOR * (memory_mb << 20), resource.RLIM_INFINITY)
        )
    tokenizer: EngineTokenizer = module.Tokenizer(path)
    return tokenizer


def _load_error(engine: str, error: Exception) -> dict[str, Any]:
    if isinstance(error, ImportError):
        missing = error.name or str(error)
        message = (
            f"The processor {engine} needs the package {missing.split('.')[0]}: install sluice-llm[{engine}] "
            f"({engine}=={TESTED_VERSIONS.get(engine, '')}), or name an interpreter that has it with --{engine}-python."
        )
        return error_form(SluiceError(ErrorKind.FAILED_PRECONDITION, message, param="model", code="missing_extra"))
    if isinstance(error, SluiceError):
        return error_form(error)
    if isinstance(error, MemoryError):
        error = RuntimeError("it needs too much memory")
    reason = (str(error).strip().split("\n", 1)[0][:200] or type(error).__name__).rstrip(".")
    message = f"The processor {engine} failed to load this tokenizer: {reason}."
    return error_form(SluiceError(ErrorKind.FAILED_PRECONDITION, message, param="model"))


def _bound_memory(memory_mb: int) -> None:
    limit = _address_space() + (memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _address_space() -> int:
    """Returns the size of this process's address space, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _serve(tokenizer: EngineTokenizer, requests: BinaryIO, replies: BinaryIO, limit_s: float) -> None:
    while header := requests.read(LENGTH.size):
        for number, verb, argument in json.loads(requests.read(LENGTH.unpack(header)[0])):
            # The alarm's default action ends a hanging process even if the parent has exited.
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            reply = [number, *_call(tokenizer, verb, argument)]
            signal.setitimer(signal.ITIMER_REAL, 0)
            # Reply immediately: the parent blames the first call without a reply for a hang or crash.
            _write(replies, [reply])


def _call(tokenizer: EngineTokenizer, verb: str, argument: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    try:
        return answer(tokenizer, verb, argument), None
    except Exception as error:
        return None, error_form(error)


def _write(replies: BinaryIO, value: Any) -> None:
    data = json.dumps(value, separators=(",", ":")).encode()
    unsent = memoryview(LENGTH.pack(len(data)) + data)
    while unsent:
        unsent = unsent[replies.write(unsent) :]
