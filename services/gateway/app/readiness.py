"""Readiness of the gateway and of the services it depends on."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from services.common.base.errors import not_found
from services.common.discovery.handoff_forms import can_hand_over
from services.gateway.admission.permit import Permit
from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.backends.workers.connections import ConnectionManager
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.core.request import Role

ALL = ("preprocess", "router", "postprocess")

PUBLIC = ("ready", "workers", "pid", "missing_extensions")
"""Fields of the state shown to requests without a key: no names of models or workers."""

POLL_INTERVAL_S = 0.05


class Readiness:
    """Reports the readiness of the gateway.

    Args:
        needed: services without which the gateway is not ready.
        missing_extensions: names of the gateway's extensions that cannot be used.
    """

    def __init__(
        self,
        preprocess: PreprocessClient,
        router: RouterClient,
        registry: WorkerRegistry,
        connections: ConnectionManager,
        needed: Collection[str] = ALL,
        missing_extensions: Collection[str] = (),
    ) -> None:
        self._preprocess = preprocess
        self._router = router
        self._registry = registry
        self._connections = connections
        self._needed = needed
        self._missing_extensions = set(missing_extensions)
        self._draining = False

    def miss(self, extension: str) -> None:
        """Adds an extension that cannot be used."""
        self._missing_extensions.add(extension)

    def drain(self) -> None:
        """Reports not ready from now on; requests in progress continue."""
        self._draining = True

    async def first(self, most_s: float) -> None:
        """Waits until the gateway is ready and connected to every registered worker, at most `most_s` seconds.

        The gateway listens only afterwards, because some load balancers check only whether the port is open.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while not self._complete:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_INTERVAL_S)

    @property
    def _complete(self) -> bool:
        return bool(self.state()["ready"]) and self._connections.connected_workers >= len(self._registry.workers)

    def report(self, permit: Permit, min_workers: int = 1) -> dict[str, Any]:
        """Returns the state as visible to a request: only the models its key may use; without a key, no names.

        Args:
            min_workers: connected workers without which the gateway is not ready.
        """
        state = self.state()
        state["ready"] = state["ready"] and state["workers"] >= min_workers
        if not permit.is_known:
            return {name: state[name] for name in PUBLIC}
        return {
            **state,
            "models": [name for name in state["models"] if permit.may_use(name)],
            "set_aside": [one for one in state["set_aside"] if permit.may_use(one["model"])],
        }

    def report_model(self, model: str, permit: Permit) -> dict[str, Any]:
        """Returns whether requests for a model can run now, and the number of its connected workers.

        Args:
            model: served name of a model or LoRA adapter.

        Raises:
            SluiceError: NOT_FOUND for a model that the key may not use, whether the model exists or not.
        """
        if not permit.may_use(model):
            raise not_found("The model does not exist.", param="model", code="model_not_found")
        entries = [entry for entry in self._registry.of_model(model) if self._is_connected(entry.worker_id)]
        prefill, decode = (
            {one.handoff_form for one in entries if one.role is role} for role in (Role.PREFILL, Role.DECODE)
        )
        paired = any(can_hand_over(ours, theirs) for ours in prefill for theirs in decode)
        complete = paired or any(entry.runs_alone for entry in entries)
        return {"ready": self.state()["ready"] and complete, "workers": len(entries)}

    def _is_connected(self, worker_id: str) -> bool:
        link = self._connections.find(worker_id)
        return link is not None and link.connected

    def state(self) -> dict[str, Any]:
        """Returns `ready`, serving replicas by service, connected workers, the process id, the served models, and how
        many registered workers receive no requests, by model and reason, and the missing extensions.
        """
        services = {
            "preprocess": len(self._preprocess.replicas.serving),
            "router": len(self._router.replicas.serving),
            "postprocess": len(self._connections.postprocess.serving),
        }
        return {
            "ready": not self._draining and all(services[name] for name in self._needed) and self._registry.synced,
            "services": services,
            "workers": self._connections.connected_workers,
            "pid": os.getpid(),  # several gateways may share a port
            "missing_extensions": sorted(self._missing_extensions),
            "models": list(self._registry.models),
            "set_aside": [
                {"model": model, "reason": reason, "workers": count}
                for (model, reason), count in sorted(Counter(self._registry.set_aside.values()).items())
            ],
        }
