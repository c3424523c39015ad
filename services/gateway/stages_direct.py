"""Placement where the request says it: no router is asked and nothing is booked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from services.common.errors import ErrorKind, SluiceError, invalid
from services.gateway.clients.catalogue import Catalogue, WorkerEntry
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.directions import Directions
from services.gateway.fleet import Fleet
from services.gateway.generation import Role, Route
from services.gateway.placement import CONNECT_SHARE, Placed, Wanted, no_such_worker

WORKER_HEADER = "x-sluice-worker"


class DirectPlacement:
    """Takes the worker, or the pair, that a request names; of several names the first that can be reached.

    Args:
        pairs: whether a prefill worker may be named.
    """

    def __init__(self, catalogue: Catalogue, fleet: Fleet, pairs: bool) -> None:
        self._catalogue = catalogue
        self._fleet = fleet
        self._pairs = pairs

    async def place(self, wanted: Wanted, excluded: Collection[str] = ()) -> Placed:
        """See PlaceStage.

        Raises:
            SluiceError: INVALID_ARGUMENT when no worker is named, or one for a part that it does not play; NOT_FOUND
                when none of those named is there.
        """
        said = wanted.request.directions
        if not said.answering:
            raise invalid(
                "This gateway runs requests where they say (routing direct), and this one does not: name a worker in "
                f"the header {WORKER_HEADER} or in nvext.decode_worker_id.",
                param=WORKER_HEADER,
                code="no_worker_named",
            )
        prefill, prefill_link = await self._prefill(said, wanted, excluded)
        entry, link = await self._first(said.answering, wanted, excluded)
        self._check(entry, prefill)
        route = Route(
            entry.worker_id,
            said.rank,
            prefill_worker_id=prefill.worker_id if prefill else "",
            prefill_rank=said.prefill_rank,
        )
        return Placed(route, link, prefill_link)

    async def _prefill(
        self, said: Directions, wanted: Wanted, excluded: Collection[str]
    ) -> tuple[WorkerEntry | None, WorkerLink | None]:
        if not said.prefill:
            return None, None
        if wanted.alone or not self._pairs:
            raise invalid("A prefill worker is named, and this gateway shares no requests.", param="prefill_worker_id")
        return await self._first(said.prefill, wanted, excluded)

    async def _first(
        self, names: Sequence[str], wanted: Wanted, excluded: Collection[str]
    ) -> tuple[WorkerEntry, WorkerLink]:
        workers = self._catalogue.of_model(wanted.request.model)
        failure: SluiceError | None = None
        for name in names:
            entry = next((one for one in workers if name in (one.worker_id, one.address)), None)
            if entry is None or entry.worker_id in excluded:
                continue
            try:
                link = self._fleet.worker(entry.worker_id)
                await link.ready(wanted.deadline.share(CONNECT_SHARE, inf))
            except SluiceError as error:
                failure = error
                if error.kind is ErrorKind.DEADLINE_EXCEEDED:
                    raise
            else:
                return entry, link
        try:
            raise failure or no_such_worker(names, wanted.request.model)
        finally:
            del failure  # it holds this call, which must not hold it as well

    def _check(self, entry: WorkerEntry, prefill: WorkerEntry | None) -> None:
        if entry.role is Role.PREFILL:
            raise invalid(
                f"Worker {entry.worker_id} only computes prompts; name a worker that answers.",
                param="decode_worker_id",
                code="wrong_role",
            )
        if prefill is None and not entry.runs_alone:
            raise invalid(
                f"Worker {entry.worker_id} computes no prompts; name a prefill worker, too.",
                param="prefill_worker_id",
                code="wrong_role",
            )
        if prefill is not None and (prefill.role, entry.role) != (Role.PREFILL, Role.DECODE):
            wrong = prefill if prefill.role is not Role.PREFILL else entry
            raise invalid(
                f"Worker {wrong.worker_id} plays the {wrong.role.name.lower()} part, and a request is shared by a "
                "prefill and a decode worker.",
                param="prefill_worker_id" if wrong is prefill else "decode_worker_id",
                code="wrong_role",
            )
