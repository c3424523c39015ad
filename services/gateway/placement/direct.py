"""Placement where the request says it: no router is asked and nothing is booked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from services.common.errors import ErrorKind, SluiceError, invalid
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.core.request import Role, Route
from services.gateway.core.routing_hints import RoutingHints, described
from services.gateway.placement.selector import CONNECT_SHARE, Placement, PlacementRequest, no_such_worker
from services.gateway.workers.connections import ConnectionManager
from services.gateway.workers.registry import WorkerEntry, WorkerRegistry

WORKER_HEADER = "x-sluice-worker"


class DirectSelector:
    """Takes the worker, or the pair, that a request names; of several names the first that can be reached.

    Args:
        pairs: whether a prefill worker may be named.
    """

    def __init__(self, registry: WorkerRegistry, connections: ConnectionManager, pairs: bool) -> None:
        self._registry = registry
        self._connections = connections
        self._pairs = pairs

    async def place(self, placement_request: PlacementRequest, excluded: Collection[str] = ()) -> Placement:
        """See PlaceStage.

        Raises:
            SluiceError: INVALID_ARGUMENT when no worker is named, or one for a part that it does not play; NOT_FOUND
                when none of those named is there.
        """
        said = placement_request.request.hints
        if not said.answering:
            raise invalid(
                "This gateway runs requests where they say (routing direct), and this one does not: name a worker in "
                f"the header {WORKER_HEADER} or in nvext.decode_worker_id.",
                param=WORKER_HEADER,
                code="no_worker_named",
            )
        prefill, prefill_link = await self._prefill(said, placement_request, excluded)
        entry, link = await self._first(said.answering, said.answering_source, placement_request, excluded)
        _check_roles(said, entry, prefill)
        _check_rank(entry, said.rank, said.source("rank"))
        if prefill is not None:
            _check_rank(prefill, said.prefill_rank, said.source("prefill_rank"))
        route = Route(
            entry.worker_id,
            said.rank,
            prefill_worker_id=prefill.worker_id if prefill else "",
            prefill_rank=said.prefill_rank,
        )
        return Placement(route, link, prefill_link)

    async def _prefill(
        self, said: RoutingHints, placement_request: PlacementRequest, excluded: Collection[str]
    ) -> tuple[WorkerEntry | None, WorkerLink | None]:
        if not said.prefill:
            return None, None
        source = said.source("prefill")
        if placement_request.alone or not self._pairs:
            raise invalid(
                f"A prefill worker is named in {described(source)}, and this gateway shares no requests.", param=source
            )
        return await self._first(said.prefill, source, placement_request, excluded)

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
            del failure  # it holds this call, which must not hold it as well


def _check_roles(said: RoutingHints, entry: WorkerEntry, prefill: WorkerEntry | None) -> None:
    answering, prefilling = said.answering_source, said.source("prefill")
    if entry.role is Role.PREFILL:
        raise _wrong_role(entry, answering, "only computes prompts; name a worker that answers")
    if prefill is None and not entry.runs_alone:
        also = f"name a prefill worker, too, in {described(prefilling)} or in nvext.prefill_worker_id"
        raise _wrong_role(entry, answering, f"computes no prompts; {also}")
    if prefill is not None and (prefill.role, entry.role) != (Role.PREFILL, Role.DECODE):
        wrong, source = (prefill, prefilling) if prefill.role is not Role.PREFILL else (entry, answering)
        part = f"plays the {wrong.role.name.lower()} part"
        raise _wrong_role(wrong, source, f"{part}, and a request is shared by a prefill and a decode worker")


def _wrong_role(worker: WorkerEntry, source: str, what: str) -> SluiceError:
    message = f"Worker {worker.worker_id}, named in {described(source)}, {what}."
    return invalid(message, param=source, code="wrong_role")


def _check_rank(worker: WorkerEntry, rank: int | None, source: str) -> None:
    if rank is not None and rank >= worker.ranks:
        raise invalid(
            f"Worker {worker.worker_id} has no data-parallel rank {rank}, which {described(source)} names; it has "
            f"{worker.ranks}, counted from 0.",
            param=source,
            code="invalid_value",
        )
