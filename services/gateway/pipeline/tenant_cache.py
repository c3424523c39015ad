"""Isolates tenants in the prefix cache with a cache salt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.common.base.errors import invalid, unavailable
from services.common.security.tenant_salts import SALT_FIELDS, check_chosen
from services.gateway.admission import tenants
from services.gateway.admission.permit import Permit
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import GenerationRequest

_REQUIRED_CAPABILITY = ("cache_salt", "")  # required by the gateway, not by a field of the request


def with_tenant_salt(
    request: GenerationRequest, workers: Sequence[WorkerEntry], permit: Permit
) -> tuple[GenerationRequest, Sequence[WorkerEntry]]:
    """Returns the request with its tenant's salt, and the workers that support salts.

    Args:
        workers: workers that can otherwise run the request, at least one.

    Returns:
        The arguments unchanged with `--tenant-salt off`, and with `--tenant-salt auto` where no engine supports salts;
        in the latter case `is_shared` is true for the request.

    Raises:
        SluiceError: INVALID_ARGUMENT for a salt that clients must not choose, UNAVAILABLE with `--tenant-salt on` when
            no engine of the model supports salts.
    """
    check_chosen(request.cache_salt)
    if permit.salts == "off":
        return request, workers
    capable = [worker for worker in workers if tenants.separates(worker.capabilities)]
    if not capable:
        if permit.salts == "on":
            raise unavailable(
                f"This gateway isolates the caches of tenants (--tenant-salt on), but no worker of model "
                f"{workers[0].model!r} has the capability 'cache_salt': start workers that have it.",
                code="engine_cannot",
            )
        return request, workers
    for name in SALT_FIELDS:  # as an engine option, it would bypass the salt
        if name in request.sampling.engine_options:
            raise invalid(f"{name} must not be an engine option; send it as a field of the request.", param=name)
    salt = permit.cache_salt(request.cache_salt)
    return replace(request, cache_salt=salt, needs=(*request.needs, _REQUIRED_CAPABILITY)), capable


def is_shared(request: GenerationRequest, permit: Permit) -> bool:
    """Returns whether a request shares its cache with other tenants because no engine supports salts."""
    return permit.salts != "off" and _REQUIRED_CAPABILITY not in request.needs
