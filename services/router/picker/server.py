"""The ExternalProcessor service: a handler for each call of Envoy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.common.errors import overloaded
from services.router.picker.exchange import Exchange, Shared
from services.router.picker.http2.call import Call, CallHandler

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


class PickerService:
    """Implements ExternalProcessor: one call for each HTTP request."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def methods(self) -> Mapping[str, Callable[[Call], CallHandler]]:
        """Returns what serves the calls, by method."""
        return {f"/{SERVICE}/Process": self.process}

    def process(self, call: Call) -> CallHandler:
        """Starts the exchange of one HTTP request; raises SluiceError (OVERLOADED) if too many are in progress."""
        shared = self._shared
        running = int(shared.metrics.picker_streams.values().get((), 0))
        if running >= shared.limits.streams:
            raise overloaded(f"{running} requests are in progress; use another replica.")
        return Exchange(shared, call)
