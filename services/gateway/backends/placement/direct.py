"""Direct routing: the request names its workers; the router is not called and nothing is reserved."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.discovery.handoff_forms import can_hand_over
from services.gateway.backends.placement.interfaces import Placement, PlacementRequest
from services.gateway.backends.placement.selector import CONNECT_SHARE, no_such_worker
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from services.gateway.core.request import Role, Route
from services.gateway.core.routing_hints import RoutingHints, described

WORKER_HEADER = "x-sluice-worker"
NEXT_NAMED_WORKER = "next_named_worker"
"""Reported as `degraded`: a later named worker runs the request, as the first is unknown or could not be reached."""


class DirectSelector:
    """Selects the worker, or the pair, named by the request; of several names, the first reachable worker.

    Args:
        pairs: whether requests may name a prefill worker.
    """

    def __init__(self, registry: WorkerRegistry, connections: ConnectionManager, pairs: bool) -> None:
        self._registry = registry
        self._connections = connections
        self._pairs = pairs

    async def place(self, placement_request: PlacementRequest, excluded: Collection[str] = ()) -> Placement:
        """Implements PlaceStage.

        Raises:
            SluiceError: INVALID_ARGUMENT when no worker is named, or one has another role or too few ranks;
                UNAVAILABLE when none of the named ones is registered or can be reached.
        """
        hints = placement_request.request.hints
        if not hints.answering:
            raise _no_worker_named(hints)
        prefill, prefill_link = await self._prefill(hints, placement_request, excluded)
        entry, link = await self._first(hints.answering, hints.answering_source, placement_request, excluded)
        _check_roles(hints, entry, prefill)
        first = _is_named_first(entry, hints.answering)
        first_prefill = prefill is None or _is_named_first(prefill, hints.prefill)
        # A rank is one of the worker named first.
        rank = hints.rank if first else None
        prefill_rank = hints.prefill_rank if first_prefill else None
        _check_rank(entry, rank, hints.source("rank"))
        if prefill is not None:
            _check_rank(prefill, prefill_rank, hints.source("prefill_rank"))
        route = Route(
            entry.worker_id,
            rank,
            prefill_worker_id=prefill.worker_id if prefill else "",
            prefill_rank=prefill_rank,
            degraded="" if first and first_prefill else NEXT_NAMED_WORKER,
        )
        return Placement(route, link, prefill_link)

    async def _prefill(
        self, hints: RoutingHints, placement_request: PlacementRequest, excluded: Collection[str]
    ) -> tuple[WorkerEntry | None, WorkerLink | None]:
        if not hints.prefill:
            return None, None
        source = hints.source("prefill")
        if placement_request.alone or not self._pairs:
            raise invalid(
                f"{described(source)} names a prefill worker, but this gateway cannot disaggregate this request; "
                "omit the prefill worker.",
                param=source,
                code="not_disaggregated",
            )
        return await self._first(hints.prefill, source, placement_request, excluded)

    async def _first(
        self, names: Sequence[str], source: str, placement_request: PlacementRequest, excluded: Collection[str]
    ) -> tuple[WorkerEntry, WorkerLink]:
        workers = self._registry.of_model(placement_request.request.model)
        failure: SluiceError | None = None
        for name in names:
            entry = next((one for one in workers if name in (one.worker_id, one.address)), None)
            if entry is None or entry.worker_id in excluded:
                continue
            try:
                link = self._connections.worker(entry.worker_id)
                await link.ready(placement_request.deadline.share(CONNECT_SHARE, inf))
            except SluiceError as error:
                failure = error
                if error.kind is ErrorKind.DEADLINE_EXCEEDED:
                    raise
            else:
                return entry, link
        try:
            raise failure or no_such_worker(names, placement_request.request.model, source)
        finally:
            del failure  # break the reference cycle: the traceback references this frame


def _is_named_first(entry: WorkerEntry, names: Sequence[str]) -> bool:
    return names[0] in (entry.worker_id, entry.address)


def _no_worker_named(hints: RoutingHints) -> SluiceError:
    sent = [hints.sources[name] for name in ("workers", "endpoints") if name in hints.sources]  # without a name in it
    source = sent[0] if sent else WORKER_HEADER
    return invalid(
        f"Missing worker: this gateway uses routing direct; name a worker in {described(source)} or in "
        "nvext.decode_worker_id.",
        param=source,
        code="no_worker_named",
    )


def _check_roles(hints: RoutingHints, entry: WorkerEntry, prefill: WorkerEntry | None) -> None:
    answering, prefilling = hints.answering_source, hints.source("prefill")
    if entry.role is Role.PREFILL:
        raise _wrong_role(entry, answering, "only runs prefill; name a decode or an aggregated worker")
    if prefill is None and not entry.runs_alone:
        hint = f"name a prefill worker as well, in {described(prefilling)} or in nvext.prefill_worker_id"
        raise _wrong_role(entry, answering, f"only runs decode; {hint}")
    if prefill is not None and (prefill.role, entry.role) != (Role.PREFILL, Role.DECODE):
        wrong, source = (prefill, prefilling) if prefill.role is not Role.PREFILL else (entry, answering)
        role = wrong.role.name.lower()
        raise _wrong_role(wrong, source, f"has the role {role}; a pair needs a prefill and a decode worker")
    if prefill is not None and not can_hand_over(prefill.handoff_form, entry.handoff_form):
        other = f"{entry.worker_id}, which runs {entry.handoff_form}"
        problem = f"runs {prefill.handoff_form} and cannot hand over to {other}; name workers of one version"
        raise _wrong_role(prefill, prefilling, problem)


def _wrong_role(worker: WorkerEntry, source: str, problem: str) -> SluiceError:
    message = f"Worker {worker.worker_id}, named in {described(source)}, {problem}."
    return invalid(message, param=source, code="wrong_role")


def _check_rank(worker: WorkerEntry, rank: int | None, source: str) -> None:
    if rank is not None and rank >= worker.ranks:
        raise invalid(
            f"Worker {worker.worker_id} does not have the data-parallel rank {rank}, named in {described(source)}; use "
            f"0 to {worker.ranks - 1}.",
            param=source,
            code="invalid_value",
        )
