"""Embeddings: token ids in, vectors out, from any worker whose engine computes them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from services.common.errors import SluiceError, unavailable
from services.common.observability import telemetry
from services.common.rpc.errors import from_rpc_error, passed_on
from services.common.tasks import end_all
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core import deadlines, request_audit
from services.gateway.workers.capabilities import able, holding
from services.gateway.workers.connections import ConnectionManager
from services.gateway.workers.registry import WorkerRegistry
from sluice.v1 import worker_pb2

INPUTS_PER_CALL = 256
CALLS_AT_ONCE = 4
ATTEMPTS = 3
NEEDS = (("embeddings", "model"),)

T = TypeVar("T")


async def all_or_none(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first SluiceError ends all jobs and is raised by itself."""
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
        failed.clear()  # what is raised holds this call, which must not hold it as well


def _failure(task: asyncio.Future[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors in the order of their inputs, each little-endian float32 back to back."""

    vectors: Sequence[bytes]
    prompt_tokens: int


class EmbedClient:
    """Calls the connected worker with the least to do; a call that broke is made again elsewhere.

    Args:
        timeout_s: longest wait for all of a request's vectors; a request may have less time than that.
    """

    def __init__(self, registry: WorkerRegistry, connections: ConnectionManager, timeout_s: float) -> None:
        self._registry = registry
        self._connections = connections
        self._timeout_s = timeout_s

    async def embed(
        self, request_id: str, model: str, inputs: Sequence[bytes], dimensions: int, lora: str = ""
    ) -> Embeddings:
        """Vectors of packed token ids, each cut to `dimensions` (0: the model's own).

        Raises:
            SluiceError: INVALID_ARGUMENT when no engine of the model embeds, UNAVAILABLE when none can be reached,
                otherwise as the worker says.
        """
        deadline = asyncio.get_running_loop().time() + min(self._timeout_s, deadlines.current().left_s)
        at_once = asyncio.Semaphore(CALLS_AT_ONCE)

        async def part(first: int) -> worker_pb2.EmbedResponse:
            message = worker_pb2.EmbedRequest(
                request_id=f"{request_id}-{first}",
                model=model,
                inputs=[worker_pb2.TokenPrompt(token_ids=ids) for ids in inputs[first : first + INPUTS_PER_CALL]],
                dimensions=dimensions,
                trace=telemetry.trace_context(None),
                lora=lora,
            )
            async with at_once:
                return await self._call(message, deadline)

        answers = await all_or_none(part(first) for first in range(0, len(inputs), INPUTS_PER_CALL))
        return Embeddings(
            [embedding.values for answer in answers for embedding in answer.embeddings],
            sum(answer.usage.prompt_tokens for answer in answers),
        )

    async def _call(self, message: worker_pb2.EmbedRequest, deadline: float) -> worker_pb2.EmbedResponse:
        tried: set[str] = set()
        while True:
            link = self._pick(message.model, message.lora, tried)
            tried.add(link.worker_id)
            request_audit.computing(link.worker_id)
            link.embedding += 1
            try:
                left_s = deadline - asyncio.get_running_loop().time()
                return await link.stub.Embed(message, timeout=max(left_s, 0.001), metadata=telemetry.grpc_metadata())
            except grpc.aio.AioRpcError as error:
                if deadlines.current().left_s <= 0:
                    raise deadlines.overdue() from error
                cause = passed_on(from_rpc_error(error, link.peer), link.peer)
                if (
                    not cause.retryable
                    or len(tried) >= ATTEMPTS
                    or not self._others(message.model, message.lora, tried)
                ):
                    try:
                        raise cause from error
                    finally:
                        del cause  # its traceback holds this call, which must not hold it as well
            finally:
                link.embedding -= 1

    def _pick(self, model: str, lora: str, tried: set[str]) -> WorkerLink:
        link = self._connections.least_busy(self._others(model, lora, tried))
        if link is None:
            raise unavailable(f"No worker that embeds with model {model!r} can be reached.", code="no_workers")
        return link

    def _others(self, model: str, lora: str, tried: set[str]) -> list[str]:
        self._registry.model(model)
        workers = holding(able(self._registry.of_model(model), NEEDS), lora)
        return [worker.worker_id for worker in workers if worker.worker_id not in tried]
