"""Client of the router: route queries, and reports about the progress of requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import grpc

from services.common.base.errors import ErrorKind, SluiceError
from services.common.rpc.concurrency_limiter import ConcurrencyLimiter
from services.common.rpc.media import span_messages
from services.common.rpc.multiplexed_call import router_stub
from services.common.rpc.replicas import ReplicaSet
from services.gateway.core import context
from services.gateway.core.request import Role, Route, Score, TokenizedPrompt
from sluice.v1 import router_pb2, router_pb2_grpc

log = logging.getLogger(__name__)

MAX_PENDING_REPORTS = 100_000
"""Reports for the router in one batch that is tried again; a larger one that fails is dropped."""
REPORT_RETRY_S = 1.0
REPORT_DELAY_S = 0.02
"""How long reports collect before they are sent; much shorter than the prefills that they tell the router about."""
DECIDER_TIMEOUT_S = 1.0
"""How long the replica that decided has to take a report, before any other gets it."""

_RESERVE = router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE
_QUERY_ONLY = router_pb2.RouteQueryRequest.MODE_QUERY_ONLY

T = TypeVar("T")


class RouterClient:
    """Sends calls to the least loaded router replica.

    Progress reports (prefill complete, request ended) collect for `REPORT_DELAY_S` and are sent in batches to the
    replicas that decided, which alone predicted what the requests leave in caches; the end of a request supersedes the
    report that its prefill is complete.

    Args:
        owner: owner of the reservations; the stream of the worker list under this name renews their lease.
        on_event: called with each incident of a call; see ReplicaSet.
        max_pause_s: longest pause between two messages of a session under load.
    """

    def __init__(
        self,
        targets: Sequence[str],
        credentials: grpc.ChannelCredentials | None,
        route_timeout_s: float,
        owner: str = "",
        on_event: Callable[[str], None] = lambda event: None,
        max_pause_s: float = 0.0,
    ) -> None:
        self.replicas: ReplicaSet[router_pb2_grpc.RouterAsyncStub] = ReplicaSet(
            "router",
            targets,
            partial(router_stub, max_pause_s=max_pause_s),
            credentials,
            shared=lambda stub: cast(Any, stub.RouteQuery),
            on_event=on_event,
        )
        self.owner = owner
        self._limiter = ConcurrencyLimiter("router")
        self._timeout_s = route_timeout_s
        self._deciders: dict[str, router_pb2_grpc.RouterAsyncStub] = {}  # of reservations whose query went to one only
        self._completed_prefills: dict[str, None] = {}  # in order of arrival
        self._outcomes: list[router_pb2.RequestOutcome] = []
        self._pending_event = asyncio.Event()
        self._all_sent = asyncio.Event()
        self._all_sent.set()

    async def route(
        self,
        request_id: str,
        model: str,
        prompt: TokenizedPrompt,
        block_size: int,
        *,
        expected_output_tokens: int = 0,
        lora: str = "",
        cache_salt: str = "",
        priority: int = 0,
        session_id: str = "",
        candidates: Sequence[str] | None = None,
        timeout_s: float | None = None,
        explain: bool = False,
        policy: str = "",
        book: bool = True,
        role: Role | None = None,
        require_pair: bool = False,
        bypass_uncached_tokens: int = 0,
    ) -> Route:
        """Chooses a worker, or a pair, and reserves capacity there; raises SluiceError as the router does.

        Args:
            session_id: id for session affinity; empty: no session.
            candidates: ids of the workers to choose from; None for all workers of the model.
            timeout_s: timeout; None for the configured one.
            explain: whether to return the scores of all candidates.
            policy: routing policy; empty for the router's default.
            book: whether to reserve; False only queries.
            role: AGGREGATED for one worker that runs the request alone; None: the router decides.
            require_pair: whether to fail rather than to run the request on one worker.
            bypass_uncached_tokens: one worker is chosen if it has at most so many tokens to compute and can run alone;
                0: as the router's setting says.
        """
        reference = router_pb2.PromptRef(prompt_tokens=prompt.estimated_length)
        if prompt.hash_scheme and block_size:
            reference.block_hashes = prompt.block_hashes
            reference.hash_scheme = prompt.hash_scheme
            reference.block_size = block_size
        else:
            reference.token_ids = prompt.token_ids
        if prompt.media:
            reference.media.extend(span_messages(item.span for item in prompt.media))
        query = router_pb2.RouteQueryRequest(
            mode=_RESERVE if book else _QUERY_ONLY,
            request_id=request_id,
            model=model,
            prompt=reference,
            lora=lora,
            cache_salt=cache_salt,
            priority=priority,
            session_id=session_id,
            expected_output_tokens=expected_output_tokens,
            candidates=None if candidates is None else router_pb2.CandidateSet(worker_ids=candidates),
            policy=policy,
            owner=self.owner,
            explain=explain,
            role=cast(Any, 0 if role is None else role.value),
            require_pair=require_pair,
            bypass_uncached_tokens=bypass_uncached_tokens,
        )
        effective_timeout_s = self._timeout_s if timeout_s is None else timeout_s
        asked: list[router_pb2_grpc.RouterAsyncStub] = []

        def route_query(stub: router_pb2_grpc.RouterAsyncStub) -> Any:
            asked.append(stub)
            return stub.RouteQuery

        await self._limiter.enter(context.current().deadline.left_s)
        try:  # a hedge is idempotent by request id
            response = await self.replicas.call(route_query, query, effective_timeout_s, hedge="route")
        finally:
            self._limiter.leave()
        if response.reservation_id and len(asked) == 1:
            self._deciders[response.reservation_id] = asked[0]
        return Route(
            worker_id=response.decode.worker_id,
            rank=response.decode.data_parallel_rank,
            reservation_id=response.reservation_id,
            degraded=response.degraded,
            scores=tuple(map(_score, response.scores)),
            prefill_worker_id=response.prefill.worker_id,
            prefill_rank=response.prefill.data_parallel_rank,
            prefill_skipped=response.prefill_skipped,
            tokens_to_compute=response.tokens_to_compute,
            headers={} if book else dict(response.headers),
            predicted_cached_tokens=response.predicted_cached_tokens,
            best_cached_tokens=response.best_cached_tokens,
            policy=response.policy,
            session_hit=response.session_hit,
            waited_ms=response.waited_ms,
            reservations=self,
        )

    async def wait_for_workers(self, model: str, max_wait_ms: int) -> None:
        """Waits in the router's admission queue until a model has a worker; books nothing.

        Raises:
            SluiceError: UNAVAILABLE if it gets none in time, NOT_FOUND for an unknown model.
        """
        query = router_pb2.RouteQueryRequest(
            mode=_QUERY_ONLY,
            model=model,
            prompt=router_pb2.PromptRef(prompt_tokens=1),
            policy="least_loaded",
            max_wait_for_workers_ms=max_wait_ms,
        )
        await self.replicas.call(lambda stub: stub.RouteQuery, query, max_wait_ms / 1000 + self._timeout_s)

    def prefill_complete(self, reservation_id: str) -> None:
        """Reports, with the next batch, that prefill of a request is complete."""
        self._completed_prefills[reservation_id] = None
        self._all_sent.clear()
        self._pending_event.set()

    def free(self, reservation_id: str, cached_tokens: int | None = None, output_tokens: int = 0) -> None:
        """Reports, with the next batch, that a request has ended, with its output and (if known) cached tokens."""
        self._completed_prefills.pop(reservation_id, None)
        self._outcomes.append(
            router_pb2.RequestOutcome(
                reservation_id=reservation_id, cached_tokens=cached_tokens, output_tokens=output_tokens
            )
        )
        self._all_sent.clear()
        self._pending_event.set()

    async def run_reports(self) -> None:
        """Sends reports until cancelled."""
        while True:
            await self._pending_event.wait()
            self._pending_event.clear()
            await asyncio.sleep(REPORT_DELAY_S)
            completed = [*self._completed_prefills]
            if await self._reported(completed, self._send_completed_prefills):
                for reservation_id in completed:
                    self._completed_prefills.pop(reservation_id, None)
            outcomes = self._outcomes[:]
            if await self._reported(outcomes, self._send_outcomes):
                del self._outcomes[: len(outcomes)]
                for outcome in outcomes:
                    self._deciders.pop(outcome.reservation_id, None)
            if not self._completed_prefills and not self._outcomes:
                self._all_sent.set()

    async def flush_reports(self, timeout_s: float) -> None:
        """Waits until all pending reports have been sent, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._all_sent.wait()

    async def _send_completed_prefills(self, reservation_ids: list[str]) -> None:
        calls = []
        for decider, ids in self._by_decider(reservation_ids, lambda reservation_id: reservation_id):
            request = router_pb2.MarkPrefillCompleteRequest(reservation_ids=ids)
            calls.append(self._report(lambda stub: stub.MarkPrefillComplete, request, decider))
        await _all_succeed(calls)

    async def _send_outcomes(self, outcomes: list[router_pb2.RequestOutcome]) -> None:
        calls = []
        for decider, group in self._by_decider(outcomes, lambda outcome: outcome.reservation_id):
            if decider is None:
                calls.append(self._send_to_all(group))
            else:
                ids = [outcome.reservation_id for outcome in group]
                request = router_pb2.FreeRequestRequest(reservation_ids=ids, outcomes=group)
                calls.append(self._report(lambda stub: stub.FreeRequest, request, decider))
        await _all_succeed(calls)

    def _by_decider(
        self, reports: Iterable[T], id_of: Callable[[T], str]
    ) -> Iterable[tuple[router_pb2_grpc.RouterAsyncStub | None, list[T]]]:
        """Returns the reports for each replica that decided; None: it is not known, or was removed."""
        serving = {replica.stub for replica in self.replicas.serving}
        groups: dict[router_pb2_grpc.RouterAsyncStub | None, list[T]] = {}
        for report in reports:
            decider = self._deciders.get(id_of(report))
            groups.setdefault(decider if decider in serving else None, []).append(report)
        return groups.items()

    async def _report(
        self,
        method: Callable[[router_pb2_grpc.RouterAsyncStub], Any],
        request: router_pb2.MarkPrefillCompleteRequest | router_pb2.FreeRequestRequest,
        decider: router_pb2_grpc.RouterAsyncStub | None,
    ) -> None:
        """Sends a report to the replica that decided, or to any if that does not take it; raises SluiceError."""
        if decider is not None:
            with contextlib.suppress(SluiceError):
                timeout_s = min(self._timeout_s, DECIDER_TIMEOUT_S)
                await self.replicas.call(method, request, timeout_s, attempts=1, prefer=decider)
                return
        await self.replicas.call(method, request, self._timeout_s)

    async def _send_to_all(self, outcomes: list[router_pb2.RequestOutcome]) -> None:
        """Sends outcomes to all replicas, several of which may have decided; one also releases the reservations."""
        released: list[object] = []

        def release(stub: router_pb2_grpc.RouterAsyncStub) -> Any:
            released[:] = [stub]
            return stub.FreeRequest

        ids = [outcome.reservation_id for outcome in outcomes]
        request = router_pb2.FreeRequestRequest(reservation_ids=ids, outcomes=outcomes)
        await self.replicas.call(release, request, self._timeout_s)
        others = [replica for replica in self.replicas.serving if replica.stub not in released]
        request = router_pb2.FreeRequestRequest(outcomes=outcomes)
        calls = [replica.stub.FreeRequest(request, timeout=self._timeout_s) for replica in others]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, grpc.aio.AioRpcError):
                log.info("sending request outcomes to a router replica failed", extra={"status": result.code().name})

    async def _reported(self, batch: list[T], send: Callable[[list[T]], Awaitable[None]]) -> bool:
        """Sends one batch; returns whether it needs no further attempt."""
        if not batch:
            return True
        try:
            await send(batch)
        except SluiceError as error:
            log.warning("sending reports to the router failed: %s", error.message, extra={"requests": len(batch)})
            # What was reported and not acknowledged may be reported again: reports are idempotent.
            again = error.retryable or error.kind is ErrorKind.DEADLINE_EXCEEDED
            if again and len(batch) < MAX_PENDING_REPORTS:
                await asyncio.sleep(REPORT_RETRY_S)
                self._pending_event.set()
                return False
        return True


async def _all_succeed(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Makes calls, and raises the first error once all have ended."""
    if len(calls) == 1:
        await calls[0]
        return
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _score(score: router_pb2.CandidateScore) -> Score:
    overlap = score.overlap
    return Score(
        worker=score.worker_id,
        rank=score.data_parallel_rank,
        cost=score.cost,
        overlap=(overlap.device_blocks, overlap.host_blocks, overlap.disk_blocks),
        predicted=overlap.predicted_blocks,
        prefill=score.prefill_blocks,
        decode=score.decode_blocks,
    )
