"""Lifecycle of routed requests as reported by their callers: prefill complete, progress, completion and outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from services.router.scheduling.decisions import Decisions, Outcome
from services.router.scheduling.prompts import NOMINAL_BLOCK
from services.router.scheduling.queries import check_tokens
from services.router.state.reservations.cost import MILLI
from services.router.state.reservations.ids import by_model, prefill_halves, request_of
from services.router.state.sync.replica import Replica


class RequestLifecycle:
    """Passes reports to the reservations of their models; ids of models that are not served count as unknown.

    Args:
        on_ended: receives a model and how many of its requests completed (0: only load was released), so that waiting
            requests can be retried.
    """

    def __init__(self, replica: Replica, decisions: Decisions, on_ended: Callable[[str, int], None]) -> None:
        self._reservations = replica.reservations
        self._synchronizer = replica.synchronizer
        self._metrics = replica.metrics
        self._decisions = decisions
        self._on_ended = on_ended

    async def mark_prefill_complete(self, reservations: Sequence[str]) -> int:
        """Releases prefill load; returns the number of unknown ids."""
        await self._free_prefill_halves(reservations)
        unknown = 0
        for model, ids in by_model(reservations).items():
            view = self._synchronizer.find(model)
            if view is None:
                unknown += len(ids)
                continue
            for request_id in ids:
                view.predictions.mark_computed(request_id)
            unknown += await self._reservations.mark_prefill_complete(model, ids)
            self._on_ended(model, 0)
        return unknown

    async def progress(self, outputs: Mapping[str, int]) -> int:
        """Reserves load for outputs longer than expected; returns the number of unknown ids.

        Args:
            outputs: total tokens generated so far by reservation id.

        Raises:
            SluiceError: INVALID_ARGUMENT for an impossible length; nothing is changed then.
        """
        groups: dict[str, dict[str, int]] = {}
        for reservation, tokens in outputs.items():
            check_tokens("progress.output_tokens", tokens)
            model, request_id = request_of(reservation)
            groups.setdefault(model, {})[request_id] = tokens
        unknown = 0
        for model, group in groups.items():
            view = self._synchronizer.find(model)
            if view is None:
                unknown += len(group)
                continue
            size = next((worker.block_size for worker in view.workers if worker.block_size), NOMINAL_BLOCK)
            booked = {request_id: -(-tokens // size) * MILLI for request_id, tokens in group.items()}
            unknown += await self._reservations.progress(model, booked)
        return unknown

    async def free(self, reservations: Sequence[str], outcomes: Sequence[Outcome] = ()) -> int:
        """Releases all load and completes decision records; returns the number of unknown ids."""
        never_ran: set[tuple[str, str]] = set()
        ended: set[str] = set()
        for outcome in outcomes:
            ended.add(outcome.reservation_id)
            if outcome.cached_tokens is None and not outcome.output_tokens:
                never_ran.add(request_of(outcome.reservation_id))
            decision = self._decisions.complete(outcome)
            if decision is not None and outcome.cached_tokens is not None:
                predicted, best = decision.predicted_cached_tokens, decision.best_cached_tokens
                self._metrics.delivered(decision.model, predicted, best, outcome.cached_tokens)
        released = by_model(reservations)
        self._end_predictions(released, never_ran)
        if elsewhere := [*ended.difference(reservations)]:  # by the replica that has the reservation
            self._end_predictions(by_model(elsewhere), never_ran)
            for groups in (prefill_halves(elsewhere), by_model(elsewhere)):
                for model, ids in groups.items():
                    self._reservations.free_local(model, ids)
        await self._free_prefill_halves(reservations)
        unknown = 0
        for model, ids in released.items():
            known = self._synchronizer.find(model) is not None
            unknown += await self._reservations.free(model, ids) if known else len(ids)
            if known:
                self._on_ended(model, len(ids))
        return unknown

    def _end_predictions(self, ended: Mapping[str, Sequence[str]], never_ran: Set[tuple[str, str]]) -> None:
        """Ends the predictions of requests, by model; of those that never ran, they are dropped."""
        for model, ids in ended.items():
            if (view := self._synchronizer.find(model)) is not None:
                for request_id in ids:
                    view.predictions.end_request(request_id, ran=(model, request_id) not in never_ran)

    async def _free_prefill_halves(self, reservations: Sequence[str]) -> None:
        """Frees the prefill halves of pairs; they may have been freed before."""
        for model, ids in prefill_halves(reservations).items():
            if self._synchronizer.find(model) is not None:
                await self._reservations.free(model, ids)
