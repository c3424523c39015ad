"""Embedding of token sequences: validation, deadline, and a check of the engine's result."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence

from services.common.errors import ErrorKind, SluiceError, internal
from services.worker.contract.engine import Embedded
from services.worker.generation.validation import validate_embedding
from services.worker.serving.worker import Worker

log = logging.getLogger(__name__)

EMBED_S = 120.0


async def embed(worker: Worker, model: str, inputs: Sequence[array[int]], dimensions: int, lora: str) -> Embedded:
    """Returns one vector per input, in input order.

    Raises:
        SluiceError: FAILED_PRECONDITION when the engine does not compute embeddings, INVALID_ARGUMENT for invalid
            inputs, RESPONSE_TIMEOUT when the engine does not respond in time.
    """
    started_s = time.monotonic()
    try:
        embedded = await _embed(worker, model, inputs, dimensions, lora)
    except SluiceError as error:
        worker.metrics.record_refusal(error.kind.name.lower())
        raise
    worker.metrics.record_embedding(len(inputs), embedded.prompt_tokens, time.monotonic() - started_s)
    return embedded


async def _embed(worker: Worker, model: str, inputs: Sequence[array[int]], dimensions: int, lora: str) -> Embedded:
    worker.gate.check()
    config = worker.config
    validate_embedding(model, lora, inputs, dimensions, config)
    adapter = lora or (model if model in config.adapters else "")
    try:
        with worker.gate.busy():
            async with asyncio.timeout(EMBED_S):
                embedded = await worker.engine.embed(inputs, dimensions, adapter)
    except TimeoutError as error:
        raise SluiceError(
            ErrorKind.RESPONSE_TIMEOUT, f"The engine did not embed the inputs within {EMBED_S:.0f} seconds."
        ) from error
    except SluiceError:
        raise
    except Exception as error:
        log.exception("embedding failed")
        raise internal("The engine failed to embed the inputs; see the worker's log.") from error
    if len(embedded.vectors) != len(inputs) or any(not vector or len(vector) % 4 for vector in embedded.vectors):
        worker.metrics.record_broken_contract("gives one vector an input")
        raise internal("The engine broke its contract: it did not return one float32 vector per input.")
    return embedded
