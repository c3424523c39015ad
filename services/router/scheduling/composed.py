"""Has composed policies rank the candidates of a request, and turns their order into offers to the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.base.errors import unavailable
from services.router.metrics import Metrics
from services.router.scheduling.policies.composition import Composition, Ranking
from services.router.scheduling.policies.contract import Candidate, PolicyRequest
from services.router.scheduling.policies.isolated.process import PolicyFailed
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
        offers: those that passed the filters; each has the number of its group, and those in no group the next number.
        groups: how many groups the picker made.
        scores: of each offer.
    """

    offers: list[Offer]
    groups: int
    scores: Mapping[WorkerRank, float]


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
        query, blocks = request.query, request.blocks
        facts = PolicyRequest(
            model=query.model,
            part=part,
            prompt_tokens=blocks.tokens,
            prompt_blocks=blocks.count,
            output_blocks=request.demand.output_blocks,
            lora=query.prompt.lora,
            priority=query.priority,
            session_id=query.session_id,
            headers=query.headers,
        )
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
        found.append(
            Candidate(
                worker_id=slot.worker_id,
                rank=slot.rank,
                address=worker.address,
                role=worker.role.name.lower(),
                capabilities=worker.capabilities,
                adapters=worker.adapters,
                total_blocks=worker.total_blocks,
                cached_blocks=request.view.index.blocks(slot),
                device_blocks=overlap.device,
                host_blocks=overlap.host,
                disk_blocks=overlap.disk,
                predicted_blocks=overlap.predicted,
                prefill_blocks=prefill,
                decode_blocks=decode,
                requests=loads.get(slot, NO_LOAD).requests + snapshot.added_requests(slot),
                cost=scale * max(prefill + offer.uncached, 0.0) + decode + offer.added,
                in_session=slot == request.pinned,
                labels=dict(worker.labels),
            )
        )
    return found


def _ranked(ranking: Ranking, offers: Sequence[Offer]) -> RankedOffers:
    groups = {at: number for number, group in enumerate(ranking.groups) for at in group}
    others = len(ranking.groups)
    return RankedOffers(
        [offers[at]._replace(group=groups.get(at, others)) for at in ranking.kept],
        others,
        {offers[at].slot: score for at, score in zip(ranking.kept, ranking.scores, strict=True)},
    )
