"""Whether this gateway can serve, and what is missing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from services.gateway.clients.catalogue import Catalogue
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.clients.router import RouterClient
from services.gateway.fleet import Fleet

ALL = ("preprocess", "router", "postprocess")

LOOK_AGAIN_S = 0.05


class Readiness:
    """Looks at the services behind the gateway.

    Args:
        needed: the services without which it cannot serve.
    """

    def __init__(
        self,
        preprocess: PreprocessClient,
        router: RouterClient,
        catalogue: Catalogue,
        fleet: Fleet,
        needed: Collection[str] = ALL,
    ) -> None:
        self._preprocess = preprocess
        self._router = router
        self._catalogue = catalogue
        self._fleet = fleet
        self._needed = needed
        self.leaving = False  # it answers what runs and takes no more

    async def first(self, most_s: float) -> None:
        """Waits until the gateway knows the workers and reaches them all, or for `most_s`: until then it does not
        listen, so that balancers which only look whether a port is open send nothing too early."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while not self._complete:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_AGAIN_S)

    @property
    def _complete(self) -> bool:
        return bool(self.state()["ready"]) and self._fleet.connected_workers >= len(self._catalogue.workers)

    def state(self) -> dict[str, Any]:
        """`ready`, then replicas that serve by service, workers that are connected, this process, and models."""
        services = {
            "preprocess": len(self._preprocess.replicas.serving),
            "router": len(self._router.replicas.serving),
            "postprocess": len(self._fleet.postprocess.serving),
        }
        return {
            "ready": not self.leaving and all(services[name] for name in self._needed) and self._catalogue.synced,
            "services": services,
            "workers": self._fleet.connected_workers,
            "pid": os.getpid(),  # several gateways may share a port
            "models": list(self._catalogue.models),
        }
