"""Whether this gateway can serve, and what is missing."""

from __future__ import annotations

from typing import Any

from services.gateway.clients.catalogue import Catalogue
from services.gateway.clients.preprocess import PreprocessClient
from services.gateway.clients.router import RouterClient
from services.gateway.fleet import Fleet


class Readiness:
    """Looks at the services behind the gateway."""

    def __init__(self, preprocess: PreprocessClient, router: RouterClient, catalogue: Catalogue, fleet: Fleet) -> None:
        self._preprocess = preprocess
        self._router = router
        self._catalogue = catalogue
        self._fleet = fleet

    def state(self) -> dict[str, Any]:
        """`ready`, then replicas that serve by service, workers that are connected, and models."""
        services = {
            "preprocess": len(self._preprocess.replicas.serving),
            "router": len(self._router.replicas.serving),
            "postprocess": len(self._fleet.postprocess.serving),
        }
        return {
            "ready": all(services.values()) and self._catalogue.synced,
            "services": services,
            "workers": self._fleet.connected_workers,
            "models": list(self._catalogue.models),
        }
