"""Puts a request into its tenant's part of the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.common.errors import invalid, unavailable
from services.gateway.admission import tenants
from services.gateway.admission.permit import Permit
from services.gateway.core.request import GenerationRequest
from services.gateway.workers.registry import WorkerEntry

_NEED = ("cache_salt", "")  # no field of the client's asks for it
_NAMESPACES = ("extra_key", "cache_salt")
"""Options of engines that choose a part of the cache, beside the request's own field."""


def separated(
    request: GenerationRequest, workers: Sequence[WorkerEntry], permit: Permit
) -> tuple[GenerationRequest, Sequence[WorkerEntry]]:
    """The request with its tenant's salt, and the workers that honour it.

    Args:
        workers: that can run the request otherwise, at least one.

    Returns:
        What came in where tenants are not kept apart, and where `--tenant-salt auto` finds no engine that can: then
        `is_shared` is true of the request.

    Raises:
        SluiceError: INVALID_ARGUMENT for a salt that clients must not choose, UNAVAILABLE when the gateway insists on
            salts and no engine of the model has them.
    """
    tenants.check_chosen(request.cache_salt)
    if permit.salts == "off":
        return request, workers
    able = [worker for worker in workers if tenants.separates(worker.capabilities)]
    if not able:
        if permit.salts == "on":
            raise unavailable(
                f"This gateway keeps the caches of tenants apart (--tenant-salt on), and no worker of model "
                f"{workers[0].model!r} has the capability 'cache_salt': start workers that have it.",
                code="engine_cannot",
            )
        return request, workers
    for name in _NAMESPACES:
        if name in request.sampling.engine_options:
            raise invalid(f"{name} must not be an engine option; send it as a field of the request.", param=name)
    salt = permit.cache_salt(request.cache_salt)
    return replace(request, cache_salt=salt, needs=(*request.needs, _NEED)), able


def is_shared(request: GenerationRequest, permit: Permit) -> bool:
    """Whether a request that passed `separated` runs in a cache that other tenants reach, although it should not."""
    return permit.salts != "off" and _NEED not in request.needs
