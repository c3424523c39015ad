"""Builds the gate that the settings describe."""

from __future__ import annotations

import logging

from services.common.addresses import host_port, is_loopback
from services.common.tasks import TaskOwner
from services.gateway.admission.gate import Gate
from services.gateway.admission.keys import KeyFile
from services.gateway.admission.limits import Limiter
from services.gateway.admission.line import Line
from services.gateway.admission.memory import MemoryLimiter
from services.gateway.admission.settings import AdmissionSettings

log = logging.getLogger(__name__)


def build_gate(settings: AdmissionSettings, listen: str, tasks: TaskOwner) -> Gate:
    """The gate; SluiceError when the key file cannot be read or the Redis URL is none."""
    keys = KeyFile(settings.api_keys_file) if settings.api_keys_file is not None else None
    place = host_port(listen)
    if keys is None and not (place is not None and is_loopback(place[0])):
        log.warning("everybody who reaches this address may ask: set --api-keys-file", extra={"address": listen})
    line = Line(settings.max_requests, settings.max_waiting, settings.line_timeout_s)
    return Gate(keys, _limiter(settings, tasks), line, tasks)


def _limiter(settings: AdmissionSettings, tasks: TaskOwner) -> Limiter:
    url = settings.limits_redis_url.get_secret_value()
    if not url:
        return MemoryLimiter()
    from services.gateway.admission.shared import SharedLimiter  # gateways that count alone need no Redis client
    from services.gateway.admission.steady import SteadyLimiter

    limiter = SteadyLimiter(SharedLimiter(url, credentials=settings.redis_credentials))
    tasks.spawn(limiter.run(), "limits")
    return limiter
