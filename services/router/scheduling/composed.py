"""Has composed policies rank the candidates of a request, and turns their order into offers to the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.errors import unavailable
from services.router.metrics import Metrics
from services.router.scheduling.policies.composition import Composition, Ranking
from services.router.scheduling.policies.contract import Candidate, PolicyRequest
from services.router.scheduling.policies.isolated.process import PolicyFailed
from services.router.scheduling.policies.offers import in_groups
from services.router.scheduling.policies.registry import ComposedPolicies
from services.router.scheduling.preselect import LoadSnapshot
from services.router.scheduling.requests import SchedulingRequest
from services.router.state.kv_index.index import NO_OVERLAP
from services.router.state.reservations.cost import NO_LOAD, Offer
from services.router.state.workers.worker import Worker, WorkerRank

log = logging.getLogger(__name__)

POLICY_FAILED = "policy_failed"


@dataclass(frozen=True, slots=True)
class RankedOffers:
    """Offers in the order of a composed policy.

    Attributes:
        preferred: offers of the picker's groups, with costs by which the store prefers earlier groups.
        others: offers of the other candidates that passed the filters, tried when `preferred` are busy.
        scores: score of each candidate that passed the filters.
        groups: number of the group of each preferred candidate; 0 is the first.
    """

    preferred: list[Offer]
    others: list[Offer]
    scores: Mapping[WorkerRank, float]
    groups: Mapping[WorkerRank, int]


class ComposedRanker:
    """Ranks candidates by the policies of a policy file."""

    def __init__(self, policies: ComposedPolicies, metrics: Metrics) -> None:
        self._policies = policies
        self._metrics = metrics

    async def rank(
        self,
        composition: Composition,
        request: SchedulingRequest,
        part: str,
        workers: Sequence[Worker],
        offers: Sequence[Offer],
        snapshot: LoadSnapshot,
    ) -> RankedOffers | None:
        """Returns the offers in the order of a policy; None if a policy with `on_failure: ignore` failed.

        A failure is logged and counted.

        Args:
            part: see PolicyRequest.
            offers: of all ranks of the workers.
            snapshot: loads of the model.

        Raises:
            SluiceError: UNAVAILABLE if the filters keep no candidate (`workers_excluded`), or if a policy with
                `on_failure: reject` failed (`policy_failed`).
        """
        facts = _request(request, part)
        candidates = _candidates(request, workers, offers, snapshot)
        try:
            ranking = await self._policies.rank(composition, facts, candidates)
        except PolicyFailed as error:
            self._metrics.policy_failures.add(1, {"policy": composition.name, "why": error.why})
            outcome = "rejecting the query" if composition.rejects else "routing by policy kv"
            log.warning("%s: %s", outcome, error.message, extra={"model": facts.model})
            if not composition.rejects:
                return None
            raise unavailable(
                f"Policy {composition.name!r} failed ({error.why}), and its filters must not be left out; try again "
                "later, or set on_failure: ignore in the policy file.",
                code=POLICY_FAILED,
            ) from None
        if not ranking.kept:
            raise unavailable(
                f"The filters of policy {composition.name!r} exclude every worker of model {facts.model!r}.",
                code="workers_excluded",
            )
        return _ranked(ranking, offers)


def _request(request: SchedulingRequest, part: str) -> PolicyRequest:
    query, blocks = request.query, request.blocks
    return PolicyRequest(
        query.model,
        part,
        blocks.tokens,
        blocks.count,
        request.demand.output_blocks,
        query.prompt.lora,
        query.priority,
        query.session_id,
        query.headers,
    )


def _candidates(
    request: SchedulingRequest, workers: Sequence[Worker], offers: Sequence[Offer], snapshot: LoadSnapshot
) -> list[Candidate]:
    """Returns the facts of each offer's rank, in order."""
    by_id = {worker.worker_id: worker for worker in workers}
    loads, scale = request.view.loads, request.query.cost.prefill_load_scale
    booked = snapshot.booked(loads)
    found = []
    for offer in offers:
        slot, worker = offer.slot, by_id[offer.slot.worker_id]
        overlap = request.overlaps.get(slot, NO_OVERLAP)
        prefill, decode = booked.get(slot, (0.0, 0.0))
        requests = loads.get(slot, NO_LOAD).requests + snapshot.added_requests(slot)
        found.append(
            Candidate(
                slot.worker_id,
                slot.rank,
                worker.address,
                worker.role.name.lower(),
                worker.capabilities,
                worker.adapters,
                worker.total_blocks,
                request.view.index.blocks(slot),
                overlap.device,
                overlap.host,
                overlap.disk,
                overlap.predicted,
                prefill,
                decode,
                requests,
                scale * max(prefill + offer.uncached, 0.0) + decode + offer.added,
                slot == request.pinned,
                dict(worker.labels),
            )
        )
    return found


def _ranked(ranking: Ranking, offers: Sequence[Offer]) -> RankedOffers:
    groups = {offers[at].slot: number for number, group in enumerate(ranking.groups) for at in group}
    kept = [offers[at] for at in ranking.kept]
    return RankedOffers(
        in_groups(kept, groups),
        [offer for offer in kept if offer.slot not in groups],
        {offers[at].slot: score for at, score in zip(ranking.kept, ranking.scores, strict=True)},
        groups,
    )
