"""Collected responses of every API: output that is returned as a whole."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from services.common.errors import SluiceError
from services.gateway.apis.common.streaming import FieldRenamer
from services.gateway.apis.common.usage import GenerationUsage
from services.gateway.http.sse import run_unless_gone


class CollectedResponse:
    """The end of a collected response, and the usage of its generations.

    Args:
        rename_fields: returns an error with its fields named as in the client's API.
        prompt_only: the usage does not count generated tokens.
    """

    def __init__(self, rename_fields: FieldRenamer, prompt_only: bool = False) -> None:
        self.usage = GenerationUsage(prompt_only)
        self._done = asyncio.Event()
        self._rename_fields = rename_fields
        self._error: SluiceError | None = None

    def fail(self, error: SluiceError) -> None:
        """Fails the response."""
        if self._error is None:
            self._error = self._rename_fields(error)
            self.usage.cancel()
            self._done.set()

    def cancel(self) -> None:
        """Cancels the generations."""
        self.usage.cancel()

    async def ended(self, receive: Receive) -> bool:
        """Waits for the end of the response; returns False, after cancelling it, if the client disconnects."""
        return await run_unless_gone(receive, self._done, self.usage.cancel)

    def check(self) -> None:
        """Raises SluiceError if the response failed."""
        error, self._error = self._error, None  # break the reference cycle: the traceback references this frame
        if error is not None:
            try:
                raise error
            finally:
                del error
