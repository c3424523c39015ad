"""Decides a query: chooses a worker, or a prefill/decode pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from services.common.base.errors import invalid
from services.router.scheduling.disaggregation import DisaggPlanner, EligibleWorkers
from services.router.scheduling.prefix_single_flight import PrefixSingleFlight
from services.router.scheduling.prompts import in_blocks, routed
from services.router.scheduling.queries import PrefixPeer, Prompt, Query, RouteResult, Score
from services.router.scheduling.requests import Part, SchedulingRequest, part_of
from services.router.scheduling.selection import Selection, Selector
from services.router.state.reservations.cost import NO_LOAD
from services.router.state.reservations.ids import reservation_id
from services.router.state.reservations.table import AllBusy
from services.router.state.store.session_affinity import SessionAffinity
from services.router.state.sync.model_state import ModelState
from services.router.state.sync.replica import Replica
from services.router.state.workers.worker import Role, Worker

BLIND = "no_block_hashes"
PAIR_BUSY = "pair_busy"
NO_PROMPT = Prompt()


class Scheduler:
    """Makes decisions; waits only for the store, stages of policies in their process, and, briefly, for decisions about
    the same new prefix."""

    def __init__(self, replica: Replica, selector: Selector, sessions: SessionAffinity, disagg: DisaggPlanner) -> None:
        self._embedded = replica.store.embedded
        self._synchronizer = replica.synchronizer
        self._selector = selector
        self._sessions = sessions
        self._disagg = disagg
        self._single_flight = PrefixSingleFlight()

    async def decide(
        self, query: Query, view: ModelState, workers: Sequence[Worker], place: bool = True, waited_ms: int = 0
    ) -> RouteResult:
        """Chooses workers, and reserves load there if the query has a request id.

        Args:
            workers: the model's workers that accept requests; at least one.
            place: False: succeed only for a request that has a reservation; any other raises AllBusy.
            waited_ms: how long the query has waited so far.

        Raises:
            AllBusy: every eligible worker is over its busy thresholds.
            SluiceError: as raised by DisaggPlanner.plan, in_blocks and Selector.pick.
        """
        started = perf_counter()
        blocks = in_blocks(query.prompt, workers)
        hashed = perf_counter()
        pinned = await self._sessions.find(query.model, query.session_id) if query.session_id else None
        booked = await self._synchronizer.booked(view) if query.explain else {}
        prepared = perf_counter()
        async with self._single_flight.matched(view, blocks.hashes, wait=bool(query.request_id)) as overlaps:
            matched = perf_counter()
            eligible = self._disagg.plan(query, workers, blocks, overlaps)
            demand = blocks.demand(query.expected_output_tokens)
            policy = self._selector.policy_of(query)
            request = SchedulingRequest(query, view, blocks, overlaps, demand, place, pinned, waited_ms, policy)
            decode, prefill, skipped = await self._select(request, eligible)
            runs_prompt = prefill or decode
            computes = query.role is not Role.DECODE
            if query.request_id and computes and not runs_prompt.choice.repeated:
                view.predict(runs_prompt.worker, runs_prompt.slot, blocks.hashes, runs_prompt.overlap, query.request_id)
            chosen = perf_counter()
        if query.session_id and query.role is not Role.PREFILL:
            await self._sessions.remember(query.model, query.session_id, decode.slot, query.session_ttl_ms)
        scores: list[Score] = []
        if query.explain:
            for each in (decode, prefill) if prefill else (decode,):
                scores += self._selector.scores(request, each, booked)
        stages = {
            "hash": hashed - started,
            "prepare": prepared - hashed,
            "match": matched - prepared,
            "choose": chosen - matched,
        }
        return self._route(request, decode, prefill, skipped, scores, started, stages)

    async def _select(
        self, request: SchedulingRequest, eligible: EligibleWorkers
    ) -> tuple[Selection, Selection | None, str]:
        """Returns the decode or standalone worker, the prefill worker if any, and why prefill workers were skipped."""
        if (role := request.query.role) is not None:
            half = await self._selector.select(request, part_of(role), eligible.standalone)
            if half.choice.repeated and half.worker not in eligible.standalone:
                raise invalid(
                    "This request_id has a reservation for another role; use a request_id of its own for each half.",
                    param="request_id",
                )
            return half, None, ""
        if not eligible.prefill:
            return await self._selector.select(request, Part.STANDALONE, eligible.standalone), None, eligible.skipped
        try:
            return *await self._select_pair(request, eligible), ""
        except AllBusy:
            if not eligible.standalone:
                raise
            return await self._selector.select(request, Part.STANDALONE, eligible.standalone), None, PAIR_BUSY

    async def _select_pair(
        self, request: SchedulingRequest, eligible: EligibleWorkers
    ) -> tuple[Selection, Selection | None]:
        """Returns a decode worker and a prefill worker that can hand over to it; none if the decode worker was reserved
        alone before.

        Raises:
            AllBusy: every pair is over its busy thresholds.
        """
        left = eligible.decode
        while True:
            decode = await self._selector.select(request, Part.DECODE, left)
            if decode.choice.repeated and decode.worker not in eligible.decode:
                return decode, None  # reserved on one worker while no prefill worker was available
            try:
                return decode, await self._selector.select(request, Part.PREFILL, eligible.partners(decode.worker))
            except AllBusy:
                await self._selector.give_back(request, Part.DECODE, decode)
                left = [worker for worker in left if worker.handoff_form != decode.worker.handoff_form]
                if not left:
                    raise
            except BaseException:
                await self._selector.give_back(request, Part.DECODE, decode)
                raise

    def _route(
        self,
        request: SchedulingRequest,
        decode: Selection,
        prefill: Selection | None,
        skipped: str,
        scores: list[Score],
        started: float,
        stages: Mapping[str, float],
    ) -> RouteResult:
        query, blocks, slot = request.query, request.blocks, decode.slot
        runs_prompt = prefill or decode
        blind = BLIND if blocks.blind and request.policy == "kv" else ""
        booked = bool(decode.choice.expires_unix_ms)
        wanted = query.return_token_ids or query.return_hashes
        return RouteResult(
            worker=decode.worker,
            rank=slot.rank,
            overlap=runs_prompt.overlap,
            best_overlap_blocks=runs_prompt.best_blocks,
            tokens_to_compute=max(blocks.tokens - runs_prompt.overlap.device * blocks.size, 0),
            index_age_ms=0 if self._embedded else request.view.age_ms,
            reservation_id=reservation_id(query.model, query.request_id, prefill is not None) if booked else "",
            expires_unix_ms=decode.choice.expires_unix_ms,
            degraded=decode.degraded or runs_prompt.degraded or blind,
            scores=scores,
            prefill_worker=prefill.worker if prefill else None,
            prefill_rank=prefill.slot.rank if prefill else 0,
            prefill_skipped=skipped,
            session_hit=slot == request.pinned,
            policy=request.policy,
            prompt_tokens=blocks.tokens,
            prompt_blocks=blocks.count,
            block_size=blocks.size,
            repeated=decode.choice.repeated,
            seconds=perf_counter() - started,
            stages=stages,
            prompt=routed(query.prompt if query.return_token_ids else NO_PROMPT, blocks) if wanted else None,
            fallbacks=self._selector.fallbacks(request, decode) if query.fallbacks else (),
            peer=self._peer(request, decode, prefill),
            half=query.role if query.role is not Role.AGGREGATED else None,
        )

    def _peer(self, request: SchedulingRequest, decode: Selection, prefill: Selection | None) -> PrefixPeer | None:
        """Returns the least loaded of the ranks that hold the most of the prompt, if the chosen worker holds less."""
        runs_prompt = prefill or decode
        most = max(decode.best_blocks, runs_prompt.best_blocks)
        if most <= runs_prompt.overlap.blocks:
            return None
        loads, peers = request.view.loads, []
        for slot, overlap in request.overlaps.items():
            if overlap.blocks == most and (worker := request.view.find(slot.worker_id)) is not None:
                peers.append((loads.get(slot, NO_LOAD).requests, slot, worker))
        if not peers:
            return None
        _, slot, worker = min(peers, key=lambda peer: peer[:2])
        return PrefixPeer(worker, slot.rank, most)
