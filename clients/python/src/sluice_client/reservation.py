"""A reservation: load that the router has reserved on a worker for one request."""

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
    """Represents a reservation; use `async with` or call `free` at the end, otherwise the router frees it on expiry.

    Attributes:
        id: for RouterClient.free and RouterClient.mark_prefill_complete.
        request_id: id of its request.
        target: the worker that decodes; its address is empty after `add_request`.
        prefill: the worker that runs the prefill; None if `target` runs the whole request.
        overlap: blocks of the prompt that the worker which prefills it has cached.
        expires_unix_ms: when the reservation expires.
        answer: the router's response; None after `add_request`.
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
        """The prompt as packed u32, ready for WorkerClient.generate; empty unless requested by `return_token_ids`."""
        return self.answer.token_ids if self.answer is not None else b""

    async def mark_prefill_complete(self) -> None:
        """Releases the prefill load, after the first token. Further calls do nothing, so call it for every token.

        A failed call is logged and not raised: `free` releases the load as well.
        """
        if self._marked or self._freed:
            return
        self._marked = True
        try:
            await self._router.mark_prefill_complete(self.id)
        except SluiceError as error:
            log.warning("reservation %s keeps its prefill load: %s", self.id, error.message)

    def report(self, output_tokens: int, cached_tokens: int | None = None) -> None:
        """Records the outcome of the request for the router's decision records; sent with `free`.

        Args:
            output_tokens: total number of generated tokens.
            cached_tokens: prompt tokens that the worker had cached; None if not reported.
        """
        self._outcome = RequestOutcome(reservation_id=self.id, output_tokens=output_tokens, cached_tokens=cached_tokens)

    async def free(self) -> None:
        """Frees the reservation, at the end of the request. Further calls do nothing.

        A failed call is logged and not raised, because the reservation expires.
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
