"""Computes embeddings with a vLLM that runs a pooling model."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import Sequence
from typing import Any

from services.common.errors import SluiceError, internal
from services.worker.contract.engine import Embedded
from services.worker.engines.vllm import library

MAX_CONCURRENT = 64


async def embed_all(llm: Any, inputs: Sequence[array[int]], dimensions: int, adapter: Any) -> Embedded:
    """Returns vectors in input order; computes at most `MAX_CONCURRENT` at a time.

    Raises:
        SluiceError: The first failure; the remaining inputs are then cancelled.
    """
    limit = asyncio.Semaphore(MAX_CONCURRENT)

    async def one(token_ids: array[int]) -> bytes:
        async with limit:
            return await _embed(llm, token_ids, dimensions, adapter)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(token_ids)) for token_ids in inputs]
    except BaseExceptionGroup as failures:
        causes = failures.exceptions
        raise next((error for error in causes if isinstance(error, SluiceError)), causes[0]) from None
    return Embedded([task.result() for task in tasks], sum(len(token_ids) for token_ids in inputs))


async def _embed(llm: Any, token_ids: array[int], dimensions: int, adapter: Any) -> bytes:
    request_id = f"embed-{uuid.uuid4().hex}"
    params = library.pooling_params(dimensions)
    try:
        async for output in llm.encode(library.prompt_of(token_ids, ""), params, request_id, lora_request=adapter):
            if output.finished:
                return library.vector_bytes(output.outputs.data)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        raise library.error_of(error) from error
    raise internal("The engine completed an embedding without a vector.")
