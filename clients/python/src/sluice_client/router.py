"""Client of the router: worker selection and reservations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from sluice_client import methods
from sluice_client.connection import A, Method, Q
from sluice_client.errors import error_of
from sluice_client.options import Credential, Options, Tls
from sluice_client.prompts import PromptLike, prompt_ref
from sluice_client.replicas import Replicas
from sluice_client.reservation import Reservation
from sluice_client.wire import (
    AddRequestRequest,
    BookedLoad,
    CandidateSet,
    CostOverrides,
    Decision,
    DumpIndexRequest,
    ErrorKind,
    FreeRequestRequest,
    GetDecisionsRequest,
    GetLoadsRequest,
    GetOverlapsRequest,
    GetQueuesRequest,
    GetQueuesResponse,
    IndexDump,
    ListWorkersRequest,
    MarkPrefillCompleteRequest,
    ReportProgressRequest,
    RequestOutcome,
    RequestProgress,
    RouteQueryRequest,
    RouteQueryRequestMode,
    RouteQueryResponse,
    WaitingQueue,
    WatchWorkersRequest,
    WorkerChange,
    WorkerInfo,
    WorkerOverlap,
    WorkerRole,
    WorkerTarget,
)


class RouterClient:
    """Calls a router; use it with `async with`, or `close` it.

    One client makes any number of concurrent calls on one connection. Every method raises SluiceError, see `errors`.

    Args:
        addresses: host:port of the router, or of several replicas that share their state: if one fails, the next
            one is used.
        tls: None for plain text.
        token: bearer token, or a function that returns one for each call.
        metadata: returns more metadata for each call, such as ``traceparent``.
        timeout_s: default timeout of a call.
        keepalive_s: interval of pings on a connection with running calls.
    """

    def __init__(
        self,
        *addresses: str,
        tls: Tls | None = None,
        token: Credential = "",
        metadata: Callable[[], Mapping[str, str]] | None = None,
        timeout_s: float = 5.0,
        keepalive_s: float = 10.0,
    ) -> None:
        self._replicas = Replicas(addresses, Options(tls, token, metadata, keepalive_s))
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the client, which ends every running call; watches end without an error."""
        self._replicas.close()

    async def query(
        self,
        model: str,
        prompt: PromptLike,
        *,
        lora: str = "",
        cache_salt: str = "",
        priority: int = 0,
        expected_output_tokens: int = 0,
        candidates: Iterable[str] | None = None,
        policy: str = "",
        cost: CostOverrides | None = None,
        explain: bool = False,
        return_token_ids: bool = False,
        role: WorkerRole = WorkerRole.UNSPECIFIED,
        timeout_s: float | None = None,
    ) -> RouteQueryResponse:
        """Returns the worker that would be selected, without a reservation; arguments as in `select_and_reserve`."""
        request = RouteQueryRequest(
            mode=RouteQueryRequestMode.QUERY_ONLY,
            model=model,
            prompt=prompt_ref(prompt),
            lora=lora,
            cache_salt=cache_salt,
            priority=priority,
            expected_output_tokens=expected_output_tokens,
            candidates=_candidates(candidates),
            policy=policy,
            cost=cost,
            explain=explain,
            return_token_ids=return_token_ids,
            role=role,
        )
        return await self.route(request, timeout_s=timeout_s)

    async def select_and_reserve(
        self,
        request_id: str,
        model: str,
        prompt: PromptLike,
        *,
        lora: str = "",
        cache_salt: str = "",
        priority: int = 0,
        expected_output_tokens: int = 0,
        candidates: Iterable[str] | None = None,
        policy: str = "",
        cost: CostOverrides | None = None,
        explain: bool = False,
        ttl_s: float = 0,
        session_id: str = "",
        session_ttl_s: float = 0,
        owner: str = "",
        max_wait_s: float = 0,
        return_token_ids: bool = False,
        role: WorkerRole = WorkerRole.UNSPECIFIED,
        timeout_s: float | None = None,
    ) -> Reservation:
        """Selects a worker and reserves it for the request, in one atomic step.

        A repeated call with the same model and request id returns the same reservation, so a call that failed half-way
        may be repeated. A reservation made by an abandoned call is freed only by repeating the call or on expiry.

        Args:
            request_id: unique among all active requests.
            model: served name.
            prompt: token ids, or a prompt made by `prompts`.
            lora: adapter name; empty for the base model.
            cache_salt: tenant salt; empty for none.
            priority: lower is served first.
            expected_output_tokens: 0 for unknown.
            candidates: ids of the workers allowed; None for all, and an empty set allows none and fails.
            policy: "kv", "round_robin", …; empty for the router's setting.
            cost: weights that differ from the router's settings.
            explain: also asks for the score of every candidate.
            ttl_s: when the reservation expires, seconds; 0 for the router's setting.
            session_id: requests of one session go to the worker of the last one while that is possible; empty for none.
            session_ttl_s: how long the session is remembered; 0 for the router's setting.
            owner: owner of the reservation, held by its watch, see `watch_workers`; empty for none.
            max_wait_s: maximum time in the queue while every candidate is busy; 0 fails at once.
            return_token_ids: also return the prompt as token ids and block hashes; see `Reservation.token_ids`.
            role: the half of the request to select for; UNSPECIFIED for whatever the router decides. Each half needs a
                request id of its own.
            timeout_s: for this call; None for the client's timeout plus the wait.
        """
        request = RouteQueryRequest(
            mode=RouteQueryRequestMode.SELECT_AND_RESERVE,
            request_id=request_id,
            model=model,
            prompt=prompt_ref(prompt),
            lora=lora,
            cache_salt=cache_salt,
            priority=priority,
            expected_output_tokens=expected_output_tokens,
            candidates=_candidates(candidates),
            policy=policy,
            cost=cost,
            explain=explain,
            ttl_ms=_ms(ttl_s),
            session_id=session_id,
            session_ttl_ms=_ms(session_ttl_s),
            owner=owner,
            max_wait_ms=_ms(max_wait_s),
            return_token_ids=return_token_ids,
            role=role,
        )
        answer = await self.route(request, timeout_s=self._timeout_s + max_wait_s if timeout_s is None else timeout_s)
        target = answer.decode or answer.prefill
        assert target is not None  # checked by `route`
        return Reservation(
            self,
            answer.reservation_id,
            request_id,
            target,
            overlap=answer.overlap,
            expires_unix_ms=answer.expires_unix_ms,
            answer=answer,
        )

    async def route(self, request: RouteQueryRequest, *, timeout_s: float | None = None) -> RouteQueryResponse:
        """Makes the call behind `query` and `select_and_reserve`, with every field of the contract."""
        answer = await self._call(methods.ROUTE, request, timeout_s, wait_s=request.max_wait_ms / 1000)
        if answer.decode is None and answer.prefill is None:
            raise error_of(
                ErrorKind.INTERNAL, "The router's response names no worker; check the versions of client and router."
            )
        return answer

    async def add_request(
        self,
        request_id: str,
        model: str,
        worker_id: str,
        prompt: PromptLike,
        *,
        data_parallel_rank: int = 0,
        lora: str = "",
        cache_salt: str = "",
        expected_output_tokens: int = 0,
        ttl_s: float = 0,
        owner: str = "",
        timeout_s: float | None = None,
    ) -> Reservation:
        """Reserves a worker selected by the caller; arguments as in `select_and_reserve`."""
        request = AddRequestRequest(
            request_id=request_id,
            model=model,
            worker_id=worker_id,
            data_parallel_rank=data_parallel_rank,
            prompt=prompt_ref(prompt),
            lora=lora,
            cache_salt=cache_salt,
            ttl_ms=_ms(ttl_s),
            owner=owner,
            expected_output_tokens=expected_output_tokens,
        )
        answer = await self._call(methods.ADD, request, timeout_s)
        return Reservation(
            self,
            answer.reservation_id,
            request_id,
            WorkerTarget(worker_id=worker_id, data_parallel_rank=data_parallel_rank),
            overlap=answer.overlap,
            expires_unix_ms=answer.expires_unix_ms,
        )

    async def mark_prefill_complete(self, *reservation_ids: str, timeout_s: float | None = None) -> int:
        """Releases the prefill load of computed prompts; returns the number of unknown ids."""
        request = MarkPrefillCompleteRequest(reservation_ids=list(reservation_ids))
        return (await self._call(methods.MARK, request, timeout_s)).unknown

    async def free(
        self, *reservation_ids: str, outcomes: Iterable[RequestOutcome] = (), timeout_s: float | None = None
    ) -> int:
        """Frees the reservations of ended requests; returns the number of unknown ids.

        Args:
            outcomes: outcomes of these or other requests, as far as available.
        """
        request = FreeRequestRequest(reservation_ids=list(reservation_ids), outcomes=list(outcomes))
        return (await self._call(methods.FREE, request, timeout_s)).unknown

    async def report_progress(self, output_tokens: Mapping[str, int], *, timeout_s: float | None = None) -> int:
        """Reports the tokens generated so far, by reservation id, with which the decode load grows.

        Call it occasionally, with a batch. Returns the number of unknown ids.
        """
        progress = [RequestProgress(reservation_id=each, output_tokens=n) for each, n in output_tokens.items()]
        return (await self._call(methods.PROGRESS, ReportProgressRequest(progress=progress), timeout_s)).unknown

    async def get_decisions(
        self, model: str = "", limit: int = 0, *, timeout_s: float | None = None
    ) -> Sequence[Decision]:
        """Returns the last reservations of one replica for a model, or all, newest first; `limit` 0 means 100."""
        request = GetDecisionsRequest(model=model, limit=limit)
        return (await self._call(methods.DECISIONS, request, timeout_s)).decisions

    async def list_workers(self, model: str = "", *, timeout_s: float | None = None) -> Sequence[WorkerInfo]:
        """Returns the workers of a model, or all, ordered by worker id."""
        return (await self._call(methods.LIST, ListWorkersRequest(model=model), timeout_s)).workers

    def watch_workers(
        self, model: str = "", *, owner: str = "", timeout_s: float | None = None
    ) -> AsyncGenerator[WorkerChange, None]:
        """Yields every worker of a model (or all), a SYNCED change, then every change as it happens.

        Ends when this client is closed. Raises if the connection is lost: then watch again, and remove the workers that
        were not yielded before SYNCED.

        Args:
            owner: makes this watch the lease of every reservation of that owner: the router frees them if the watch
                ends and is not started again within the lease.
            timeout_s: None for an unlimited watch.
        """
        return self._replicas.stream(methods.WATCH, WatchWorkersRequest(model=model, owner=owner), timeout_s)

    async def get_queues(self, model: str = "", *, timeout_s: float | None = None) -> Sequence[WaitingQueue]:
        """Returns the requests that wait at one replica for a worker of a model, or of all."""
        return (await self._call(methods.QUEUES, GetQueuesRequest(model=model), timeout_s)).queues

    def watch_queues(
        self, model: str = "", *, timeout_s: float | None = None
    ) -> AsyncGenerator[GetQueuesResponse, None]:
        """Yields the waiting requests of one replica after every change, such as to scale a model from zero."""
        return self._replicas.stream(methods.WATCH_QUEUES, GetQueuesRequest(model=model), timeout_s)

    async def get_loads(self, model: str = "", *, timeout_s: float | None = None) -> Sequence[BookedLoad]:
        """Returns the reserved and reported load of every worker and rank of a model, or all."""
        return (await self._call(methods.LOADS, GetLoadsRequest(model=model), timeout_s)).loads

    async def get_overlaps(
        self, model: str, prompt: PromptLike, *, lora: str = "", cache_salt: str = "", timeout_s: float | None = None
    ) -> Sequence[WorkerOverlap]:
        """Returns the overlap of a prompt with each worker and rank; those without any are left out."""
        request = GetOverlapsRequest(model=model, prompt=prompt_ref(prompt), lora=lora, cache_salt=cache_salt)
        return (await self._call(methods.OVERLAPS, request, timeout_s)).overlaps

    def dump_index(self, model: str = "", *, timeout_s: float = 60.0) -> AsyncGenerator[IndexDump, None]:
        """Yields the block index of a model (or all) on one replica, in parts; unpack them with `unpack_u64`."""
        return self._replicas.stream(methods.DUMP, DumpIndexRequest(model=model), timeout_s)

    async def _call(self, method: Method[Q, A], request: Q, timeout_s: float | None, wait_s: float = 0.0) -> A:
        time_s = self._timeout_s if timeout_s is None else timeout_s
        return await self._replicas.unary(method, request, time_s, wait_s)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _candidates(worker_ids: Iterable[str] | None) -> CandidateSet | None:
    return None if worker_ids is None else CandidateSet(worker_ids=list(worker_ids))
