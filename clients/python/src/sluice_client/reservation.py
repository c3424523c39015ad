"""A reservation: load that the router has booked on a worker for one request."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Self

from sluice_client.errors import SluiceError
from sluice_client.wire import Overlap, RequestOutcome, RouteQueryResponse, WorkerTarget

if TYPE_CHECKING:
    from types import TracebackType

    from sluice_client.router import RouterClient

log = logging.getLogger("sluice_client")


class Reservation:
    """Leave it with `async with`, or call `free`, when the request is over; else the router frees it when it expires.

    Attributes:
        id: names it in RouterClient.free and RouterClient.mark_prefill_complete.
        request_id: the request it is for.
        target: the worker that answers; its address is empty after `add_request`, whose caller knows it.
        prefill: the worker that runs the prompt first; None when `target` does everything.
        overlap: blocks of the prompt that the worker which runs it holds already.
        expires_unix_ms: when the router gives the load back by itself.
        answer: all that the router said; None after `add_request`.
    """

    def __init__(
        self,
        router: RouterClient,
        reservation_id: str,
        request_id: str,
        target: WorkerTarget,
        *,
        overlap: Overlap | None,
        expires_unix_ms: int,
        answer: RouteQueryResponse | None = None,
    ) -> None:
        self._router = router
        self._marked = False
        self._freed = False
        self._outcome: RequestOutcome | None = None
        self.id = reservation_id
        self.request_id = request_id
        self.target = target
        self.prefill = answer.prefill if answer is not None else None
        self.overlap = overlap or Overlap()
        self.expires_unix_ms = expires_unix_ms
        self.answer = answer

    @property
    def token_ids(self) -> bytes:
        """The prompt as packed u32, ready for WorkerClient.generate; empty unless `return_token_ids` asked for it."""
        return self.answer.token_ids if self.answer is not None else b""

    async def mark_prefill_complete(self) -> None:
        """The first token is there. Only the first call costs anything, so it may be made for every token.

        A router that cannot be told is logged and ends no request: the load is given back with the rest.
        """
        if self._marked or self._freed:
            return
        self._marked = True
        try:
            await self._router.mark_prefill_complete(self.id)
        except SluiceError as error:
            log.warning("reservation %s keeps its prefill load: %s", self.id, error.message)

    def report(self, output_tokens: int, cached_tokens: int | None = None) -> None:
        """What the request turned out to be, for the router's record of decisions. Travels with `free`.

        Args:
            output_tokens: generated in all.
            cached_tokens: prompt tokens that the worker found in its cache; None when it did not say.
        """
        self._outcome = RequestOutcome(reservation_id=self.id, output_tokens=output_tokens, cached_tokens=cached_tokens)

    async def free(self) -> None:
        """The request is over. Only the first call costs anything.

        A router that cannot be told is logged, because the reservation expires by itself.
        """
        if self._freed:
            return
        self._freed = True
        try:
            await self._router.free(self.id, outcomes=[self._outcome] if self._outcome else [])
        except SluiceError as error:
            log.warning("reservation %s stays until it expires: %s", self.id, error.message)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.free()
