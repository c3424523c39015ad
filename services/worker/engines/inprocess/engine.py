"""The base of engines that push tokens from their own loops into sinks."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import Embedded, GenerateContext, LLMEngine
from services.worker.contract.generation import Delta, GenerateRequest, StopParams

log = logging.getLogger(__name__)

MAX_CONCURRENT_EMBEDDINGS = 64
"""Inputs of one call that an engine embeds at the same time; the others wait."""
WARM_UP_S = 300.0


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

    async def warm_up_logprobs(self) -> None:
        """Computes log-probabilities once, before requests are accepted; a failure is only logged.

        Engines that compile code for them when they are first asked for take up to a minute for it, in which no
        request gets a token and the canary takes the engine for hung.
        """
        prompt = array("I", [1, 1])  # vLLM's file connector ends its engine on a prompt of one token
        request = GenerateRequest(
            "sluice-warm-up", "", prompt, stop=StopParams(max_tokens=1, ignore_eos=True), logprobs=1
        )
        problem = ""
        try:
            async with asyncio.timeout(WARM_UP_S):
                async with aclosing(self.generate(request, GenerateContext(request.request_id))) as deltas:
                    async for delta in deltas:
                        problem = delta.error.message if delta.error is not None else ""
        except TimeoutError:
            problem = f"it took more than {WARM_UP_S:g} s"
        except SluiceError as error:
            problem = error.message
        if problem:
            log.warning("the engine computed no log-probabilities to warm up: %s", problem)


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
