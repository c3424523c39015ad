"""What callers tell about their requests after they were routed: computed, how far, over, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from services.router.metrics import Metrics
from services.router.reservations.cost import MILLI
from services.router.reservations.ids import by_model, prefill_halves, request_of
from services.router.scheduling.decisions import Decisions, Outcome
from services.router.scheduling.prompts import NOMINAL_BLOCK
from services.router.scheduling.request_limits import check_tokens
from services.router.sync.reservation_manager import ReservationManager
from services.router.sync.synchronizer import IndexSynchronizer


class RequestLifecycle:
    """Passes reports on to the books of their models; ids of models nobody serves are as unknown as any other.

    Args:
        on_ended: told how many requests of a model are over or have their prompts computed, so that others can start.
    """

    def __init__(
        self,
        bookkeeper: ReservationManager,
        keeper: IndexSynchronizer,
        decisions: Decisions,
        metrics: Metrics,
        on_ended: Callable[[str, int], None],
    ) -> None:
        self._bookkeeper = bookkeeper
        self._keeper = keeper
        self._decisions = decisions
        self._metrics = metrics
        self._on_ended = on_ended

    async def mark_prefill_complete(self, reservations: Sequence[str]) -> int:
        """Gives prefill load back; returns how many ids were unknown."""
        await self._free_prefill_halves(reservations)
        unknown = 0
        for model, ids in by_model(reservations).items():
            view = self._keeper.find(model)
            if view is None:
                unknown += len(ids)
                continue
            for request_id in ids:
                view.predictions.computed(request_id)
            unknown += await self._bookkeeper.mark_prefill_complete(model, ids)
            self._on_ended(model, 0)
        return unknown

    async def progress(self, outputs: Mapping[str, int]) -> int:
        """Books longer outputs than expected; returns how many ids were unknown.

        Args:
            outputs: reservation id → tokens generated so far, all in all.

        Raises:
            SluiceError: INVALID_ARGUMENT for a length that cannot be; then nothing is booked.
        """
        groups: dict[str, dict[str, int]] = {}
        for reservation, tokens in outputs.items():
            check_tokens("progress.output_tokens", tokens)
            model, request_id = request_of(reservation)
            groups.setdefault(model, {})[request_id] = tokens
        unknown = 0
        for model, group in groups.items():
            view = self._keeper.find(model)
            if view is None:
                unknown += len(group)
                continue
            size = next((worker.block_size for worker in view.workers if worker.block_size), NOMINAL_BLOCK)
            booked = {request_id: -(-tokens // size) * MILLI for request_id, tokens in group.items()}
            unknown += await self._bookkeeper.progress(model, booked)
        return unknown

    async def free(self, reservations: Sequence[str], outcomes: Sequence[Outcome] = ()) -> int:
        """Gives all load back and completes decision records; returns how many ids were unknown."""
        for outcome in outcomes:
            decision = self._decisions.complete(outcome)
            if decision is not None and outcome.cached_tokens is not None:
                self._metrics.delivered(decision)
        self._tell_predictions(reservations, outcomes)
        self._end_here(outcomes)
        await self._free_prefill_halves(reservations)
        unknown = 0
        for model, ids in by_model(reservations).items():
            known = self._keeper.find(model) is not None
            unknown += await self._bookkeeper.free(model, ids) if known else len(ids)
            if known:
                self._on_ended(model, len(ids))
        return unknown

    def _tell_predictions(self, reservations: Sequence[str], outcomes: Sequence[Outcome]) -> None:
        never_ran = {each.reservation_id for each in outcomes if each.cached_tokens is None and not each.output_tokens}
        for reservation in {*reservations, *(each.reservation_id for each in outcomes)}:
            model, request_id = request_of(reservation)
            if (view := self._keeper.find(model)) is not None:
                view.predictions.over(request_id, ran=reservation not in never_ran)

    def _end_here(self, outcomes: Sequence[Outcome]) -> None:
        """Gives back what is booked in this replica only: the one that was asked to free it cannot know."""
        over = [each.reservation_id for each in outcomes]
        for groups in (prefill_halves(over), by_model(over)):
            for model, ids in groups.items():
                self._bookkeeper.free_here(model, ids)

    async def _free_prefill_halves(self, reservations: Sequence[str]) -> None:
        """Of pairs; they may be free already."""
        for model, ids in prefill_halves(reservations).items():
            if self._keeper.find(model) is not None:
                await self._bookkeeper.free(model, ids)
