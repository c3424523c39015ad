"""The router: which worker should run a prompt, and the book of who runs what."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from sluice_client.connection import A, Method, Q
from sluice_client.errors import error_of
from sluice_client.options import Credential, Options, Tls
from sluice_client.prompts import PromptLike, prompt_ref
from sluice_client.replicas import Replicas
from sluice_client.reservation import Reservation
from sluice_client.wire import (
    AddRequestRequest,
    AddRequestResponse,
    BookedLoad,
    CandidateSet,
    CostOverrides,
    DumpIndexRequest,
    ErrorKind,
    FreeRequestRequest,
    FreeRequestResponse,
    GetLoadsRequest,
    GetLoadsResponse,
    GetOverlapsRequest,
    GetOverlapsResponse,
    IndexDump,
    ListWorkersRequest,
    ListWorkersResponse,
    MarkPrefillCompleteRequest,
    MarkPrefillCompleteResponse,
    RouteQueryRequest,
    RouteQueryRequestMode,
    RouteQueryResponse,
    WatchWorkersRequest,
    WorkerChange,
    WorkerInfo,
    WorkerOverlap,
    WorkerTarget,
)

_SERVICE = "/sluice.v1.Router/"
_ROUTE = Method(_SERVICE + "RouteQuery", RouteQueryRequest, RouteQueryResponse)
_ADD = Method(_SERVICE + "AddRequest", AddRequestRequest, AddRequestResponse)
_MARK = Method(_SERVICE + "MarkPrefillComplete", MarkPrefillCompleteRequest, MarkPrefillCompleteResponse)
_FREE = Method(_SERVICE + "FreeRequest", FreeRequestRequest, FreeRequestResponse)
_LIST = Method(_SERVICE + "ListWorkers", ListWorkersRequest, ListWorkersResponse)
_WATCH = Method(_SERVICE + "WatchWorkers", WatchWorkersRequest, WorkerChange)
_LOADS = Method(_SERVICE + "GetLoads", GetLoadsRequest, GetLoadsResponse)
_OVERLAPS = Method(_SERVICE + "GetOverlaps", GetOverlapsRequest, GetOverlapsResponse)
_DUMP = Method(_SERVICE + "DumpIndex", DumpIndexRequest, IndexDump)


class RouterClient:
    """Asks a router. Use it with `async with`, or `close` it.

    One client carries any number of calls at once on one connection. Every method raises SluiceError, see `errors`.

    Args:
        addresses: host:port of the router, or of several replicas that share their state: the next one is asked when
            one cannot answer.
        tls: None for plain text.
        token: bearer token, or what gives one for each call.
        metadata: gives more metadata for each call, such as ``traceparent``.
        timeout_s: for each call that does not say otherwise.
        keepalive_s: how often a connection with calls under way is tested.
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
        """Ends every call under way; watches end without an error."""
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
        timeout_s: float | None = None,
    ) -> RouteQueryResponse:
        """Which worker would be chosen? Books nothing. The arguments are those of `select_and_reserve`."""
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
        timeout_s: float | None = None,
    ) -> Reservation:
        """Chooses a worker and books the request on it, in one atomic step.

        A repeated call with the same model and request id gets the same reservation and books nothing more, so a call
        that failed half-way may be repeated. Nobody frees what a call has booked that the caller gave up, except its
        repetition or the expiry.

        Args:
            request_id: unique among all requests alive.
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
            timeout_s: for this call.
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
            ttl_ms=int(ttl_s * 1000),
        )
        answer = await self.route(request, timeout_s=timeout_s)
        assert answer.decode is not None  # `route` has looked
        return Reservation(
            self,
            answer.reservation_id,
            request_id,
            answer.decode,
            overlap=answer.overlap,
            expires_unix_ms=answer.expires_unix_ms,
            answer=answer,
        )

    async def route(self, request: RouteQueryRequest, *, timeout_s: float | None = None) -> RouteQueryResponse:
        """The call behind `query` and `select_and_reserve`, with every field of the contract."""
        answer = await self._call(_ROUTE, request, timeout_s)
        if answer.decode is None:
            raise error_of(ErrorKind.INTERNAL, "The router's answer names no worker.")
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
        ttl_s: float = 0,
        timeout_s: float | None = None,
    ) -> Reservation:
        """Books a request on a worker that the caller chose itself."""
        request = AddRequestRequest(
            request_id=request_id,
            model=model,
            worker_id=worker_id,
            data_parallel_rank=data_parallel_rank,
            prompt=prompt_ref(prompt),
            lora=lora,
            cache_salt=cache_salt,
            ttl_ms=int(ttl_s * 1000),
        )
        answer = await self._call(_ADD, request, timeout_s)
        return Reservation(
            self,
            answer.reservation_id,
            request_id,
            WorkerTarget(worker_id=worker_id, data_parallel_rank=data_parallel_rank),
            overlap=answer.overlap,
            expires_unix_ms=answer.expires_unix_ms,
        )

    async def mark_prefill_complete(self, *reservation_ids: str, timeout_s: float | None = None) -> int:
        """These prompts are computed: gives their prefill load back. Returns how many ids the router did not know."""
        request = MarkPrefillCompleteRequest(reservation_ids=list(reservation_ids))
        return (await self._call(_MARK, request, timeout_s)).unknown

    async def free(self, *reservation_ids: str, timeout_s: float | None = None) -> int:
        """These requests are over: gives their load back. Returns how many ids the router did not know."""
        request = FreeRequestRequest(reservation_ids=list(reservation_ids))
        return (await self._call(_FREE, request, timeout_s)).unknown

    async def list_workers(self, model: str = "", *, timeout_s: float | None = None) -> Sequence[WorkerInfo]:
        """The workers of a model, or all, by worker id."""
        return (await self._call(_LIST, ListWorkersRequest(model=model), timeout_s)).workers

    def watch_workers(self, model: str = "", *, timeout_s: float | None = None) -> AsyncGenerator[WorkerChange, None]:
        """Every worker of a model (or all), a SYNCED change, then every change as it happens.

        Ends when this client is closed. Raises when the router goes away: watch again then, and forget the workers
        that were not named before SYNCED.

        Args:
            timeout_s: None to watch until one of the two ends it.
        """
        return self._replicas.stream(_WATCH, WatchWorkersRequest(model=model), timeout_s)

    async def get_loads(self, model: str = "", *, timeout_s: float | None = None) -> Sequence[BookedLoad]:
        """Booked and reported load of every worker and rank of a model, or all."""
        return (await self._call(_LOADS, GetLoadsRequest(model=model), timeout_s)).loads

    async def get_overlaps(
        self, model: str, prompt: PromptLike, *, lora: str = "", cache_salt: str = "", timeout_s: float | None = None
    ) -> Sequence[WorkerOverlap]:
        """How much of a prompt each worker and rank holds; those with nothing are left out."""
        request = GetOverlapsRequest(model=model, prompt=prompt_ref(prompt), lora=lora, cache_salt=cache_salt)
        return (await self._call(_OVERLAPS, request, timeout_s)).overlaps

    def dump_index(self, model: str = "", *, timeout_s: float = 60.0) -> AsyncGenerator[IndexDump, None]:
        """The block index of a model (or all) as one replica sees it, in pieces: unpack them with `unpack_u64`."""
        return self._replicas.stream(_DUMP, DumpIndexRequest(model=model), timeout_s)

    async def _call(self, method: Method[Q, A], request: Q, timeout_s: float | None) -> A:
        return await self._replicas.unary(method, request, self._timeout_s if timeout_s is None else timeout_s)


def _candidates(worker_ids: Iterable[str] | None) -> CandidateSet | None:
    return None if worker_ids is None else CandidateSet(worker_ids=list(worker_ids))
