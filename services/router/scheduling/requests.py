"""A query prepared for selection, and the parts of a request that are selected separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from services.router.scheduling.policies.offers import Demand
from services.router.scheduling.prompts import Blocks
from services.router.scheduling.queries import Query
from services.router.state.kv_index.index import Overlap
from services.router.state.sync.model_state import ModelState
from services.router.state.workers.worker import Role, WorkerRank


class Part(Enum):
    """Part of the request that the chosen worker runs."""

    STANDALONE = "standalone"
    PREFILL = "prefill"
    DECODE = "decode"


def part_of(role: Role) -> Part:
    """Returns the part that workers of a role run."""
    return {Role.PREFILL: Part.PREFILL, Role.DECODE: Part.DECODE}.get(role, Part.STANDALONE)


@dataclass(frozen=True, slots=True)
class SchedulingRequest:
    """A query with the blocks and overlaps of its prompt.

    Attributes:
        place: False: succeed only if the request has a reservation.
        pinned: rank of the session's last request.
    """

    query: Query
    view: ModelState
    blocks: Blocks
    overlaps: Mapping[WorkerRank, Overlap]
    place: bool = True
    pinned: WorkerRank | None = None

    @property
    def demand(self) -> Demand:
        """Blocks that the request needs."""
        blocks = self.blocks
        return Demand(blocks.count, -(-self.query.expected_output_tokens // blocks.size), blocks.encoding)
