"""Router: where a prompt goes, and what it is told about the request afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import grpc

from services.common.errors import SluiceError
from services.common.rpc.concurrency_limiter import ConcurrencyLimiter
from services.common.rpc.multiplexed_call import MultiplexedCall
from services.common.rpc.replicas import ReplicaSet
from services.gateway.core import deadlines
from services.gateway.core.request import Route, Score, TokenizedPrompt
from sluice.v1 import router_pb2, router_pb2_grpc

log = logging.getLogger(__name__)

REPORT_BACKLOG = 100_000
REPORT_RETRY_S = 1.0

_BOOK = router_pb2.RouteQueryRequest.MODE_SELECT_AND_RESERVE
_ASK = router_pb2.RouteQueryRequest.MODE_QUERY_ONLY

N = TypeVar("N")


class RouterClient:
    """Asks whichever router replica has the least to do.

    Progress reports (prefill done, request over) are batched: while one report is under way the next one collects.

    Args:
        owner: whose lease holds the reservations; whoever follows the router's worker list under this name renews it.
    """

    def __init__(
        self,
        targets: Sequence[str],
        credentials: grpc.ChannelCredentials | None,
        route_timeout_s: float,
        owner: str = "",
    ) -> None:
        self.replicas: ReplicaSet[router_pb2_grpc.RouterAsyncStub] = ReplicaSet(
            "router", targets, _stub, credentials, shared=lambda stub: cast(Any, stub.RouteQuery)
        )
        self.owner = owner
        self._turnstile = ConcurrencyLimiter("router")
        self._timeout_s = route_timeout_s
        self._computed: list[str] = []
        self._over: list[router_pb2.RequestOutcome] = []
        self._news = asyncio.Event()
        self._told_all = asyncio.Event()
        self._told_all.set()

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
    ) -> Route:
        """Chooses a worker, or a pair, and books the request there; SluiceError as the router says.

        Args:
            session_id: requests of one session go to one worker; empty: no session.
            candidates: worker ids to choose from; None for all of the model.
            timeout_s: longest wait; None for the setting.
            explain: the answer says what the router thought of each candidate.
            policy: how to choose; empty for the router's setting.
            book: False only asks.
        """
        reference = router_pb2.PromptRef(prompt_tokens=prompt.estimated_length)
        if prompt.hash_scheme and block_size:
            reference.block_hashes = prompt.block_hashes
            reference.hash_scheme = prompt.hash_scheme
            reference.block_size = block_size
        else:
            reference.token_ids = prompt.token_ids
        query = router_pb2.RouteQueryRequest(
            mode=_BOOK if book else _ASK,
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
        )
        longest_s = self._timeout_s if timeout_s is None else timeout_s
        async with self._turnstile.turn(deadlines.current().left_s):  # a hedge is idempotent by request id
            answer = await self.replicas.call(lambda stub: stub.RouteQuery, query, longest_s, hedge="route")
        return Route(
            worker_id=answer.decode.worker_id,
            rank=answer.decode.data_parallel_rank,
            reservation_id=answer.reservation_id,
            degraded=answer.degraded,
            scores=tuple(map(_score, answer.scores)),
            prefill_worker_id=answer.prefill.worker_id,
            prefill_rank=answer.prefill.data_parallel_rank,
            prefill_skipped=answer.prefill_skipped,
            tokens_to_compute=answer.tokens_to_compute,
            headers={} if book else dict(answer.headers),
        )

    def prefill_complete(self, reservation_id: str) -> None:
        """Tells, soon, that a request's prompt is computed."""
        self._computed.append(reservation_id)
        self._told_all.clear()
        self._news.set()

    def free(self, reservation_id: str, cached_tokens: int | None = None, output_tokens: int = 0) -> None:
        """Tells, soon, that a request is over, how long its output was and, if known, what was cached of its prompt."""
        self._over.append(
            router_pb2.RequestOutcome(
                reservation_id=reservation_id, cached_tokens=cached_tokens, output_tokens=output_tokens
            )
        )
        self._told_all.clear()
        self._news.set()

    async def run_reports(self) -> None:
        """Sends the reports until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            self._computed = await self._report(self._computed, self._tell_computed)
            self._over = await self._report(self._over, self._tell_over)
            if not self._computed and not self._over:
                self._told_all.set()

    async def flush_reports(self, timeout_s: float) -> None:
        """Waits until everything told so far has been sent, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._told_all.wait(), timeout_s)

    async def _tell_computed(self, reservation_ids: list[str]) -> None:
        request = router_pb2.MarkPrefillCompleteRequest(reservation_ids=reservation_ids)
        await self.replicas.call(lambda stub: stub.MarkPrefillComplete, request, self._timeout_s)

    async def _tell_over(self, outcomes: list[router_pb2.RequestOutcome]) -> None:
        ids = [outcome.reservation_id for outcome in outcomes]
        request = router_pb2.FreeRequestRequest(reservation_ids=ids)
        await self.replicas.call(lambda stub: stub.FreeRequest, request, self._timeout_s)
        # Any replica can free, but each remembers only its own decisions: all of them hear how these ended.
        request = router_pb2.FreeRequestRequest(outcomes=outcomes)
        calls = [replica.stub.FreeRequest(request, timeout=self._timeout_s) for replica in self.replicas.serving]
        for told in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(told, grpc.aio.AioRpcError):
                log.info("a router replica did not hear how requests ended", extra={"status": told.code().name})

    async def _report(self, news: list[N], tell: Callable[[list[N]], Awaitable[None]]) -> list[N]:
        """Sends one batch; what is left to send afterwards, which includes what came in meanwhile."""
        if not news:
            return news
        batch = news[:]
        try:
            await tell(batch)
        except SluiceError as error:
            log.warning("a report to the router was not delivered: %s", error.message, extra={"requests": len(batch)})
            if error.retryable and len(news) < REPORT_BACKLOG:
                await asyncio.sleep(REPORT_RETRY_S)
                self._news.set()
                return news
        return news[len(batch) :]


def _stub(channel: grpc.aio.Channel) -> router_pb2_grpc.RouterAsyncStub:
    """A stub whose calls of RouteQuery share a stream."""
    stub: Any = router_pb2_grpc.RouterStub(channel)
    stub.RouteQuery = MultiplexedCall(
        "router", stub.RouteQuery, stub.Session, router_pb2.RouteCall, router_pb2.RouteCalls
    )
    typed: router_pb2_grpc.RouterAsyncStub = stub
    return typed


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
