"""The process that runs an engine's tokenizer: serves calls from its standard input until that is closed.

Its first frame is the tokenizer's facts or an error. A request is [verb, argument] as JSON; a reply [result, error].
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, first_line
from services.common.child_rpc.child import Channel, ChildLimits, serve
from services.common.packages.engines import NOT_NEEDED, import_failure, stand_in_for_absent
from services.preprocess.engines.tokenizer import EngineTokenizer, answer, error_form

LOAD_FACTOR = 2
"""Memory limit while loading, as a multiple of the limit afterwards."""

Answer = Callable[[str, dict[str, Any]], Any]
"""Returns the result of a call, given its verb and argument."""


def main(arguments: list[str]) -> None:
    """Runs the process of a tokenizer.

    Args:
        arguments: the engine; the tokenizer's path; as `host` has them.
    """
    engine, path, *rest = arguments

    def load(limit: Callable[[], None]) -> tuple[dict[str, Any], Answer]:
        stand_in_for_absent(*NOT_NEEDED.get(engine, ()))
        module = importlib.import_module(f"services.preprocess.engines.{engine}")
        limit()
        return prepared(module.Tokenizer(Path(path)))

    host(rest, load, partial(_load_error, engine))


def prepared(tokenizer: EngineTokenizer) -> tuple[dict[str, Any], Answer]:
    """Returns the facts of a tokenizer, and what answers its calls."""
    return asdict(tokenizer.facts), partial(answer, tokenizer)


def host(
    arguments: list[str],
    load: Callable[[Callable[[], None]], tuple[dict[str, Any], Answer]],
    load_error: Callable[[Exception], SluiceError],
) -> None:
    """Loads what answers calls, sends its facts, and serves calls to it.

    Args:
        arguments: the limits; a folder for temporary files, which the parent removes because this process may be
            killed; "foreign" if the files came from a worker.
        load: returns the facts, and what answers; given what limits the memory of loading beyond the library's code.
        load_error: converts what `load` raises.
    """
    limits, foreign = ChildLimits.read(arguments[0]), "foreign" in arguments[2:]
    tempfile.tempdir = arguments[1]
    channel = Channel.of_stdio()
    try:
        facts, answering = load(partial(limits.apply_memory, LOAD_FACTOR, False) if foreign else lambda: None)
    except Exception as error:
        channel.send_json({"error": error_form(load_error(error))})
        return
    limits.apply()
    run(channel, facts, answering, limits.alarm_s)


def run(channel: Channel, facts: dict[str, Any], answering: Answer, alarm_s: float = 0.0) -> None:
    """Sends the facts and serves calls."""
    channel.send_json({"facts": facts})
    serve(channel, partial(_reply, answering), alarm_s)


def _load_error(engine: str, error: Exception) -> SluiceError:
    if isinstance(error, SluiceError):
        return error
    if isinstance(error, ImportError):
        return import_failure(engine, f"Prompts of {engine}", error)
    reason = "it needs too much memory" if isinstance(error, MemoryError) else first_line(error, 200)
    message = f"The processor {engine} failed to load this tokenizer: {(reason or type(error).__name__).rstrip('.')}."
    return SluiceError(ErrorKind.FAILED_PRECONDITION, message, param="model")


def _reply(answering: Answer, request: bytes) -> bytes:
    try:
        reply = [answering(*json.loads(request)), None]
    except Exception as error:
        reply = [None, error_form(error)]
    return json.dumps(reply, separators=(",", ":")).encode()
