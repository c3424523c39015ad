"""A query prepared for selection, and the parts of a request that are selected separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from services.router.scheduling.policies.offers import Demand, MakeOffer
from services.router.scheduling.prompts import Blocks
from services.router.scheduling.queries import Query
from services.router.state.kv_index.index import NO_OVERLAP, Overlap
from services.router.state.reservations.cost import Offer
from services.router.state.sync.model_state import ModelState
from services.router.state.workers.worker import Role, WorkerRank


class Part(Enum):
    """Part of the request that the chosen worker runs; `label` is its value, read at every decision."""

    STANDALONE = "standalone"
    PREFILL = "prefill"
    DECODE = "decode"

    def __init__(self, label: str) -> None:
        self.label = label


def part_of(role: Role) -> Part:
    """Returns the part that workers of a role run."""
    return {Role.PREFILL: Part.PREFILL, Role.DECODE: Part.DECODE}.get(role, Part.STANDALONE)


@dataclass(frozen=True, slots=True)
class SchedulingRequest:
    """A query with the blocks and overlaps of its prompt.

    Attributes:
        place: False: succeed only if the request has a reservation.
        demand: blocks that the request needs.
        pinned: rank of the session's last request.
        waited_ms: how long the query has waited so far.
        policy: name of the policy that applies.
    """

    query: Query
    view: ModelState
    blocks: Blocks
    overlaps: Mapping[WorkerRank, Overlap]
    demand: Demand
    place: bool = True
    pinned: WorkerRank | None = None
    waited_ms: int = 0
    policy: str = ""

    def offers(self, slots: Sequence[WorkerRank], make: MakeOffer, part: Part) -> list[Offer]:
        """Returns the offers of ranks for one part: computation for prefill workers, KV blocks for decode workers."""
        held, overlaps, demand, cost = self.view.index.blocks, self.overlaps, self.demand, self.query.cost
        return of_part([make(slot, overlaps.get(slot, NO_OVERLAP), held(slot), demand, cost) for slot in slots], part)


def of_part(offers: list[Offer], part: Part) -> list[Offer]:
    """Restricts offers to the load of one part."""
    if part is Part.PREFILL:
        return [offer._replace(added=0.0, book_decode=0) for offer in offers]
    if part is Part.DECODE:
        return [offer._replace(uncached=0.0, book_prefill=0) for offer in offers]
    return offers
