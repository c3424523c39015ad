"""Decides one query: which worker, or which pair of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.router.reservations.cost import Load
from services.router.reservations.ids import reservation_id
from services.router.reservations.table import AllBusy
from services.router.scheduling.disaggregation import Cast, Casting
from services.router.scheduling.prefix_single_flight import PrefixSingleFlight
from services.router.scheduling.prompts import in_blocks, routed
from services.router.scheduling.queries import Query, Route, Score
from services.router.scheduling.selection import Part, SchedulingRequest, Selection, Selector
from services.router.scheduling.session_affinity import SessionAffinity
from services.router.scheduling.stopwatch import Stopwatch
from services.router.store.base import Store
from services.router.sync.model_state import ModelState
from services.router.sync.synchronizer import IndexSynchronizer
from services.router.workers.worker import Worker, WorkerRank

BLIND = "no_block_hashes"
PAIR_BUSY = "pair_busy"


class Scheduler:
    """One attempt at a decision; it does not wait for anything but the store.

    Args:
        policy: of queries that name none.
    """

    def __init__(
        self,
        store: Store,
        keeper: IndexSynchronizer,
        selector: Selector,
        sessions: SessionAffinity,
        casting: Casting,
        policy: str,
    ) -> None:
        self._store = store
        self._keeper = keeper
        self._selector = selector
        self._sessions = sessions
        self._casting = casting
        self._policy = policy
        self._siblings = PrefixSingleFlight()

    async def decide(self, query: Query, view: ModelState, workers: Sequence[Worker], place: bool = True) -> Route:
        """Chooses, and books if the query has a request id.

        Args:
            workers: of the model that take requests; at least one.
            place: False to answer only a request that is booked already, and refuse any other as AllBusy.

        Raises:
            AllBusy: every worker that may run it is over the thresholds.
            SluiceError: as Casting.cast, in_blocks and Selector.pick.
        """
        watch = Stopwatch()
        blocks = in_blocks(query.prompt, workers)
        watch.lap("hash")
        pinned = await self._sessions.find(query.model, query.session_id) if query.session_id else None
        booked = await self._keeper.booked(view) if query.explain else {}
        watch.lap("prepare")
        async with self._siblings.matched(view, blocks.hashes, wait=bool(query.request_id)) as overlaps:
            watch.lap("match")
            cast = self._casting.cast(workers, query.candidates, blocks, overlaps)
            ask = SchedulingRequest(query, view, blocks, overlaps, place, pinned)
            answers, prefill, skipped = await self._picks(ask, cast)
            runs = prefill or answers
            if query.request_id and not runs.choice.repeated:
                view.expect(runs.worker, runs.slot, blocks.hashes, runs.overlap, query.request_id)
            watch.lap("choose")
        if query.session_id:
            await self._sessions.remember(query.model, query.session_id, answers.slot, query.session_ttl_ms)
        route = self._route(ask, answers, prefill, skipped)
        scores = self._scores(ask, booked, answers, prefill)
        return replace(route, scores=scores, seconds=watch.seconds, stages=watch.laps)

    async def _picks(self, ask: SchedulingRequest, cast: Cast) -> tuple[Selection, Selection | None, str]:
        """The worker that answers, the one that prefills for it, and why there is none although there could be."""
        if not cast.prefill:
            return await self._selector.pick(ask, Part.WHOLE, cast.whole), None, cast.skipped
        try:
            decode = await self._selector.pick(ask, Part.DECODE, cast.decode)
            if decode.choice.repeated and decode.worker not in cast.decode:
                return decode, None, ""  # booked as a whole when there was no prefill worker yet
            try:
                return decode, await self._selector.pick(ask, Part.PREFILL, cast.prefill), ""
            except BaseException:
                await self._selector.give_back(ask, Part.DECODE, decode)
                raise
        except AllBusy:
            if not cast.whole:
                raise
            return await self._selector.pick(ask, Part.WHOLE, cast.whole), None, PAIR_BUSY

    def _route(self, ask: SchedulingRequest, answers: Selection, prefill: Selection | None, skipped: str) -> Route:
        query, blocks = ask.query, ask.blocks
        runs = prefill or answers
        policy = query.policy or self._policy
        blind = BLIND if blocks.blind and policy == "kv" else ""
        booked = bool(answers.choice.expires_unix_ms)
        return Route(
            answers.worker,
            answers.slot.rank,
            runs.overlap,
            runs.best_blocks,
            max(blocks.tokens - runs.overlap.device * blocks.size, 0),
            0 if self._store.embedded else ask.view.age_ms,
            reservation_id(query.model, query.request_id, prefill is not None) if booked else "",
            answers.choice.expires_unix_ms,
            answers.degraded or runs.degraded or blind,
            prefill_worker=prefill.worker if prefill else None,
            prefill_rank=prefill.slot.rank if prefill else 0,
            prefill_skipped=skipped,
            session_hit=answers.slot == ask.pinned,
            policy=policy,
            prompt_tokens=blocks.tokens,
            prompt_blocks=blocks.count,
            block_size=blocks.size,
            repeated=answers.choice.repeated,
            prompt=routed(query.prompt, blocks) if query.return_token_ids else None,
        )

    def _scores(
        self, ask: SchedulingRequest, booked: dict[WorkerRank, Load], answers: Selection, prefill: Selection | None
    ) -> list[Score]:
        """Of the workers that could have answered, then of those that could have prefilled."""
        if not ask.query.explain:
            return []
        found = self._selector.scores(ask, answers.offers, booked)
        return found + self._selector.scores(ask, prefill.offers, booked) if prefill else found
