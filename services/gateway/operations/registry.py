"""The operations of a gateway by path, whatever API they belong to."""

from __future__ import annotations

from typing import Any

from services.common.base.errors import not_found
from services.gateway.backends.workers.model_waits import ModelWaits
from services.gateway.core import context
from services.gateway.operations.operation import Answer, Caller, Operation


class Operations:
    """Runs operations for the model that a body names, or for the only one; waits for a model without workers.

    Args:
        model_waits: holds requests of models without workers; None: they are refused.
    """

    def __init__(self, model_waits: ModelWaits | None = None) -> None:
        self._model_waits = model_waits
        self._by_path: dict[str, Operation] = {}

    def add(self, path: str, operation: Operation, *, adds_model: bool = True) -> Operation:
        """Adds an operation and returns what transports run.

        Args:
            adds_model: a body without a model gets the only one that is served.
        """
        waits = self._model_waits

        async def run(body: dict[str, Any], caller: Caller) -> Answer | None:
            if waits is not None:
                if adds_model and body.get("model") is None and (model := waits.only_model()):
                    context.current().permit.check_model(model, "model")
                    body["model"] = model
                if isinstance(body.get("model"), str):
                    await waits.ready(body["model"])
            return await operation(body, caller)

        self._by_path[path] = run
        return run

    def of(self, path: str) -> Operation:
        """Returns the operation of a path; raises SluiceError(NOT_FOUND) without one."""
        try:
            return self._by_path[path]
        except KeyError:
            raise not_found(f"No operation is served at {path!r}.") from None
