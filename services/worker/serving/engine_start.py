"""Starts an engine; whatever goes wrong becomes one sentence."""

from __future__ import annotations

import logging

from services.common.errors import ErrorKind, SluiceError
from services.worker.contract.engine import EngineConfig, LLMEngine

log = logging.getLogger(__name__)


async def started(engine: LLMEngine, worker_id: str) -> EngineConfig:
    """What the engine serves.

    Raises:
        SluiceError: as the engine says, or FAILED_PRECONDITION for whatever else it raises.
    """
    try:
        config = await engine.start(worker_id)
    except SluiceError:
        raise
    except MemoryError as error:
        raise _cannot("there is not enough memory for the model and its cache", "out_of_memory") from error
    except Exception as error:
        log.debug("the engine's start failed", exc_info=True)
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        raise _cannot(f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__, "") from error
    if not config.model:
        raise _cannot("it names no model", "")
    return config


def _cannot(why: str, code: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, f"The engine cannot start: {why}.", code=code)
