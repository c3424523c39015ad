"""Builds the store that the settings describe."""

from __future__ import annotations

from services.common.tasks import TaskOwner
from services.gateway.apis.responses.store import MemoryStore, ResponseStore
from services.gateway.settings import GatewaySettings


def build_store(settings: GatewaySettings, tasks: TaskOwner) -> ResponseStore:
    """The store; SluiceError when the Redis URL is none."""
    url = settings.responses_redis_url.get_secret_value()
    of_all = (settings.responses_kept, settings.responses_kept_mb << 20)
    of_tenant = (settings.responses_kept_per_tenant, settings.responses_kept_per_tenant_mb << 20)
    one_tenant = settings.api_keys_file is None
    of_tenant = of_all if one_tenant else (min(of_all[0], of_tenant[0]), min(of_all[1], of_tenant[1]))
    if not url:
        return MemoryStore(*of_all, settings.responses_kept_s, of_owner=of_tenant)
    from services.gateway.apis.responses.redis_store import RedisStore  # gateways on their own need no Redis client

    return RedisStore(url, *of_tenant, settings.responses_kept_s, tasks, credentials=settings.redis_credentials)
