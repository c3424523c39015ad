"""Builds the store that the settings describe."""

from __future__ import annotations

from services.common.tasks import TaskOwner
from services.gateway.openai.responses.store import MemoryStore, ResponseStore
from services.gateway.settings import GatewaySettings


def build_store(settings: GatewaySettings, tasks: TaskOwner) -> ResponseStore:
    """The store; SluiceError when the Redis URL is none."""
    url = settings.responses_redis_url.get_secret_value()
    bounds = (settings.responses_kept, settings.responses_kept_mb << 20, settings.responses_kept_s)
    if not url:
        return MemoryStore(*bounds)
    from services.gateway.openai.responses.redis_store import RedisStore  # gateways on their own need no Redis client

    return RedisStore(url, *bounds, tasks, credentials=settings.redis_credentials)
