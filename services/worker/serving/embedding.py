"""Embedding and classification of token sequences: validation, deadline, and a check of the engine's result."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.base.errors import ErrorKind, SluiceError, internal
from services.worker.contract.capabilities import Capability
from services.worker.contract.engine import Embedded
from services.worker.generation.validation import validate_embedding
from services.worker.serving.worker import Worker

log = logging.getLogger(__name__)

EMBED_S = 120.0


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """A call of Embed; `second_text_at` has one index per input, 0 for one text."""

    model: str
    inputs: Sequence[array[int]]
    second_text_at: Sequence[int]
    dimensions: int
    lora: str


async def embed(worker: Worker, call: EmbedCall) -> Embedded:
    """Returns one vector per input, in input order.

    Raises:
        SluiceError: FAILED_PRECONDITION when the engine computes neither embeddings nor classes, INVALID_ARGUMENT for
            invalid inputs, RESPONSE_TIMEOUT when the engine does not respond in time.
    """
    started_s = time.monotonic()
    try:
        embedded = await _embed(worker, call)
    except SluiceError as error:
        worker.metrics.record_refusal(error.kind.name.lower())
        raise
    worker.metrics.record_embedding(len(call.inputs), embedded.prompt_tokens, time.monotonic() - started_s)
    return embedded


async def _embed(worker: Worker, call: EmbedCall) -> Embedded:
    worker.gate.check()
    config = worker.config
    validate_embedding(call.model, call.lora, call.inputs, call.dimensions, config)
    adapter = call.lora or (call.model if call.model in config.adapters else "")
    classifies = Capability.CLASSIFICATION in config.capabilities
    values = len(config.labels) if classifies else 0
    try:
        with worker.gate.busy():
            async with asyncio.timeout(EMBED_S):
                if classifies:
                    embedded = await worker.engine.classify(call.inputs, call.second_text_at, adapter)
                else:
                    embedded = await worker.engine.embed(call.inputs, call.dimensions, adapter)
    except TimeoutError as error:
        raise SluiceError(
            ErrorKind.RESPONSE_TIMEOUT, f"The engine did not embed the inputs within {EMBED_S:.0f} seconds."
        ) from error
    except SluiceError:
        raise
    except Exception as error:
        log.exception("embedding failed")
        raise internal("The engine failed to embed the inputs; see the worker's log.") from error
    if len(embedded.vectors) != len(call.inputs) or any(
        not vector or len(vector) % 4 or len(vector) != 4 * (values or len(vector) // 4) for vector in embedded.vectors
    ):
        worker.metrics.record_broken_contract("gives one vector an input")
        raise internal("The engine broke its contract: it did not return one float32 vector per input.")
    return embedded
