"""Whether this gateway can serve, and what is missing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from services.gateway.clients.catalogue import Catalogue
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.clients.router import RouterClient
from services.gateway.fleet import Fleet

ALL = ("preprocess", "router", "postprocess")


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

    def state(self) -> dict[str, Any]:
        """`ready`, then replicas that serve by service, workers that are connected, and models."""
        services = {
            "preprocess": len(self._preprocess.replicas.serving),
            "router": len(self._router.replicas.serving),
            "postprocess": len(self._fleet.postprocess.serving),
        }
        return {
            "ready": not self.leaving and all(services[name] for name in self._needed) and self._catalogue.synced,
            "services": services,
            "workers": self._fleet.connected_workers,
            "models": list(self._catalogue.models),
        }
