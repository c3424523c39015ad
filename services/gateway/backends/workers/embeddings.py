"""Client for embeddings and classes, served by workers whose engine computes them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import grpc

from services.common.base.errors import ErrorKind, SluiceError, unavailable
from services.common.base.tasks import asked_to_end, end_all
from services.common.observability import telemetry
from services.common.rpc.errors import from_rpc_error, has_detail, passed_on
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.backends.workers.capabilities import able, with_adapter
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from services.gateway.core import context
from services.gateway.core.deadlines import overdue
from services.gateway.core.deaths import MAX_DEATHS, is_death
from sluice.v1 import worker_pb2

INPUTS_PER_CALL = 256
MAX_CONCURRENT_CALLS = 4
"""Calls to workers that one embeddings request makes at the same time; its other inputs wait."""
ATTEMPTS = 3
NEEDS = (("embeddings", "model"),)
CLASSIFICATION = "classification"

T = TypeVar("T")


async def all_or_none(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs jobs concurrently and returns their results in order; the first error cancels all others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [error for error in map(_failure, tasks) if error is not None]
        if not failed:
            return [task.result() for task in tasks]
    finally:
        await end_all(tasks)
        tasks.clear()
    try:
        raise next((error for error in failed if isinstance(error, SluiceError)), failed[0])
    finally:
        failed.clear()  # break the reference cycle: the traceback references this frame


def _failure(task: asyncio.Future[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


MAX_EMBED_S = 60.0
"""Seconds until all vectors of a request are computed; then DEADLINE_EXCEEDED."""


class EmbedInput(NamedTuple):
    """Packed token ids; of a pair of texts also the index of the first token of the second one, else 0."""

    token_ids: bytes
    second_text_at: int = 0


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors, or probabilities of classes, in the order of their inputs, each packed little-endian float32."""

    vectors: Sequence[bytes]
    prompt_tokens: int


def pooling(workers: Sequence[WorkerEntry]) -> list[WorkerEntry]:
    """Returns the workers that classify, else those that embed; raises SluiceError(INVALID_ARGUMENT) without either."""
    return [worker for worker in workers if CLASSIFICATION in worker.capabilities] or able(workers, NEEDS)


class EmbedClient:
    """Sends calls to the least loaded connected worker, and retries failed calls on others.

    Args:
        timeout_s: timeout for all vectors of a request; the request's deadline may be earlier.
    """

    def __init__(self, registry: WorkerRegistry, connections: ConnectionManager, timeout_s: float) -> None:
        self._registry = registry
        self._connections = connections
        self._timeout_s = timeout_s

    async def embed(
        self, request_id: str, model: str, inputs: Sequence[EmbedInput], dimensions: int, lora: str = ""
    ) -> Embeddings:
        """Returns the vectors of inputs, truncated to `dimensions` (0: the model's full size); classes of a model that
        classifies.

        Raises:
            SluiceError: INVALID_ARGUMENT when no engine of the model computes them, UNAVAILABLE when no worker can be
                reached, otherwise the worker's error.
        """
        deadline = asyncio.get_running_loop().time() + min(self._timeout_s, context.current().deadline.left_s)
        concurrent = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        deaths: set[str] = set()

        async def embed_batch(first: int) -> worker_pb2.EmbedResponse:
            message = worker_pb2.EmbedRequest(
                request_id=f"{request_id}-{first}",
                model=model,
                inputs=[
                    worker_pb2.TokenPrompt(token_ids=each.token_ids, second_text_at=each.second_text_at)
                    for each in inputs[first : first + INPUTS_PER_CALL]
                ],
                dimensions=dimensions,
                trace=telemetry.trace_context(None),
                lora=lora,
            )
            async with concurrent:
                return await self._call(message, deadline, deaths)

        responses = await all_or_none(embed_batch(first) for first in range(0, len(inputs), INPUTS_PER_CALL))
        return Embeddings(
            [embedding.values for response in responses for embedding in response.embeddings],
            sum(response.usage.prompt_tokens for response in responses),
        )

    async def _call(
        self, message: worker_pb2.EmbedRequest, deadline: float, deaths: set[str]
    ) -> worker_pb2.EmbedResponse:
        """Makes one call, again on another worker where it fails.

        Args:
            deaths: workers that died while they ran a call of the request; with MAX_DEATHS no further one is tried.
        """
        tried: set[str] = set()
        while True:
            link = self._pick(message.model, message.lora, tried)
            tried.add(link.worker_id)
            if (audit := context.current().audit) is not None:
                audit.worked_on_by(link.worker_id)
            link.embedding += 1
            try:
                left_s = deadline - asyncio.get_running_loop().time()
                return await link.stub.Embed(message, timeout=max(left_s, 0.001), metadata=telemetry.grpc_metadata())
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and asked_to_end():
                    raise
                if context.current().deadline.left_s <= 0:
                    raise overdue() from error
                cause = _cause(error, link)
                if is_death(cause):
                    deaths.add(link.worker_id)
                if (
                    not cause.retryable
                    or len(tried) >= ATTEMPTS
                    or len(deaths) >= MAX_DEATHS
                    or not self._others(message.model, message.lora, tried)
                ):
                    try:
                        raise cause from error
                    finally:
                        del cause  # break the reference cycle: the traceback references this frame
            finally:
                link.embedding -= 1

    def _pick(self, model: str, lora: str, tried: set[str]) -> WorkerLink:
        link = self._connections.least_busy(self._others(model, lora, tried))
        if link is None:
            raise unavailable(f"No worker of model {model!r} can be reached; try again later.", code="no_workers")
        return link

    def _others(self, model: str, lora: str, tried: set[str]) -> list[str]:
        self._registry.model(model)
        workers = with_adapter(pooling(self._registry.of_model(model)), lora)
        return [worker.worker_id for worker in workers if worker.worker_id not in tried]


def _cause(error: grpc.aio.AioRpcError | asyncio.CancelledError, link: WorkerLink) -> SluiceError:
    """Returns the typed error of a call that failed, or that ended with its channel because the worker was given up."""
    if isinstance(error, asyncio.CancelledError):
        return SluiceError(ErrorKind.DISCONNECTED, f"The connection to the {link.peer} was lost.")
    if error.code() is grpc.StatusCode.UNAVAILABLE and not has_detail(error):
        return SluiceError(ErrorKind.DISCONNECTED, f"The connection to the {link.peer} was lost.")
    return passed_on(from_rpc_error(error, link.peer), link.peer)
