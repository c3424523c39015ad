"""The process that runs an engine's tokenizer: serves calls from its standard input until that is closed.

Its first frame is the tokenizer's facts or an error. A request is [verb, argument] as JSON; a reply [result, error].
"""

from __future__ import annotations

import importlib
import json
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from services.common.child_rpc.child import Channel, limit_memory, serve
from services.common.errors import ErrorKind, SluiceError, first_line
from services.common.packages.engines import NOT_NEEDED, import_failure, stand_in_for_absent
from services.preprocess.engines.tokenizer import EngineTokenizer, answer, error_form

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
    channel = Channel.of_stdio()
    try:
        tokenizer = _load(engine, path, memory_mb if foreign else 0)
    except Exception as error:
        channel.send_json({"error": _load_error(engine, error)})
        return
    limit_memory(memory_mb)
    run(channel, tokenizer, limit_s)


def run(channel: Channel, tokenizer: EngineTokenizer, limit_s: float) -> None:
    """Sends the facts of a loaded tokenizer and serves calls to it."""
    channel.send_json({"facts": asdict(tokenizer.facts)})
    serve(channel, partial(_reply, tokenizer), limit_s)


def _load(engine: str, path: Path, memory_mb: int) -> EngineTokenizer:
    """Loads the tokenizer; `memory_mb` limits its memory beyond the engine's own code, 0 for no limit."""
    stand_in_for_absent(*NOT_NEEDED.get(engine, ()))
    module = importlib.import_module(f"services.preprocess.engines.{engine}")
    if memory_mb:
        limit_memory(LOAD_FACTOR * memory_mb, final=False)
    tokenizer: EngineTokenizer = module.Tokenizer(path)
    return tokenizer


def _load_error(engine: str, error: Exception) -> dict[str, Any]:
    if isinstance(error, SluiceError):
        return error_form(error)
    if isinstance(error, ImportError):
        return error_form(import_failure(engine, f"Prompts of {engine}", error))
    reason = "it needs too much memory" if isinstance(error, MemoryError) else first_line(error, 200)
    message = f"The processor {engine} failed to load this tokenizer: {(reason or type(error).__name__).rstrip('.')}."
    return error_form(SluiceError(ErrorKind.FAILED_PRECONDITION, message, param="model"))


def _reply(tokenizer: EngineTokenizer, request: bytes) -> bytes:
    try:
        reply = [answer(tokenizer, *json.loads(request)), None]
    except Exception as error:
        reply = [None, error_form(error)]
    return json.dumps(reply, separators=(",", ":")).encode()
