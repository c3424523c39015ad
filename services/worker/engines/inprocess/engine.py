"""The base of engines that push tokens from their own loops into sinks."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from services.common.errors import ErrorKind, SluiceError
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import Embedded, GenerateContext, LLMEngine
from services.worker.contract.generation import Delta, GenerateRequest

MAX_CONCURRENT_EMBEDDINGS = 64


class InProcessEngine(LLMEngine):
    """Derives `generate` from `submit`; a subclass implements `submit` and `abort`."""

    async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        stream = DeltaStream()
        self.submit(request, context, stream)
        try:
            async with aclosing(stream.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.abort(context)


async def embed_each(inputs: Sequence[array[int]], embed: Callable[[int], Awaitable[bytes]]) -> Embedded:
    """Returns vectors in input order; computes at most `MAX_CONCURRENT_EMBEDDINGS` at a time.

    Args:
        embed: computes the vector of the input with this index.

    Raises:
        SluiceError: The first failure; the remaining inputs are then cancelled.
    """
    limit = asyncio.Semaphore(MAX_CONCURRENT_EMBEDDINGS)

    async def one(index: int) -> bytes:
        async with limit:
            return await embed(index)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(len(inputs))]
    except BaseExceptionGroup as failures:
        causes = failures.exceptions
        raise next((error for error in causes if isinstance(error, SluiceError)), causes[0]) from None
    return Embedded([task.result() for task in tasks], sum(len(token_ids) for token_ids in inputs))


def starting() -> SluiceError:
    """Returns the error of calls before the engine has started."""
    return SluiceError(
        ErrorKind.UNAVAILABLE, "The engine is still starting; try again shortly.", code="engine_starting"
    )


def embeddings_only() -> SluiceError:
    """Returns the error of generations on an embedding model."""
    return _pools_only("computes embeddings")


def classes_only() -> SluiceError:
    """Returns the error of generations on a model that classifies."""
    return _pools_only("classifies texts")


def _pools_only(what: str) -> SluiceError:
    return SluiceError(
        ErrorKind.FAILED_PRECONDITION,
        f"This worker only {what}; send the request to a model that generates text.",
        param="model",
        code="unsupported_by_engine",
    )
