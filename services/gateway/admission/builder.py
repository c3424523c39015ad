"""Creates the gate from the settings."""

from __future__ import annotations

import logging
from dataclasses import replace

from services.common.base.tasks import TaskOwner
from services.common.net.addresses import host_port, is_loopback
from services.gateway.admission import scopes
from services.gateway.admission.fair_queue import FairQueue
from services.gateway.admission.gate import Gate
from services.gateway.admission.keys import ANONYMOUS, ApiKey, KeyFile
from services.gateway.admission.limits import Limiter
from services.gateway.admission.local_limiter import LocalLimiter
from services.gateway.admission.settings import AdmissionSettings

log = logging.getLogger(__name__)


def build_gate(settings: AdmissionSettings, listen: str, tasks: TaskOwner) -> Gate:
    """Returns the gate; raises SluiceError if the key file cannot be read or the Redis URL is invalid."""
    keys = KeyFile(settings.api_keys_file) if settings.api_keys_file is not None else None
    anonymous = _anonymous(settings, listen)
    if keys is None and not is_loopback(settings.published_host or _host(listen)):
        log.warning(
            "every client that can reach this address may use the models; set --api-keys-file",
            extra={"address": listen, "scopes": ",".join(scopes.ordered(anonymous.scopes))},
        )
    queue = FairQueue(settings.max_requests, settings.max_waiting, settings.queue_timeout_s)
    limiter = _limiter(settings, tasks)
    per_tenant = settings.max_requests_per_tenant
    return Gate(keys, limiter, queue, tasks, anonymous, settings.tenant_salt, per_tenant)


def _anonymous(settings: AdmissionSettings, listen: str) -> ApiKey:
    """Returns the key of requests to a gateway without API keys."""
    if settings.anonymous_scopes is not None:
        return replace(ANONYMOUS, scopes=scopes.parse(settings.anonymous_scopes))
    local = is_loopback(settings.published_host or _host(listen))
    return ANONYMOUS if local else replace(ANONYMOUS, scopes=scopes.DEFAULT)


def _host(listen: str) -> str:
    address = host_port(listen)
    return address[0] if address else listen


def _limiter(settings: AdmissionSettings, tasks: TaskOwner) -> Limiter:
    url = settings.limits_redis_url.get_secret_value()
    if not url:
        return LocalLimiter()
    from services.gateway.admission.fallback_limiter import FallbackLimiter
    from services.gateway.admission.redis_limiter import RedisLimiter  # optional dependency

    limiter = FallbackLimiter(RedisLimiter(url, credentials=settings.redis_credentials))
    tasks.spawn(limiter.run(), "limits")
    return limiter
