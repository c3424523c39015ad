"""Builds the stores of responses from the settings."""

from __future__ import annotations

from services.common.base.tasks import TaskOwner
from services.common.net.intake.pace import BodyPace
from services.gateway.apis.responses.redis_store import RedisStore
from services.gateway.apis.responses.store import MemoryStore, ResponseStore, StoreLimits
from services.gateway.http.socket_turns import MAX_LIFETIME_S, max_sockets
from services.gateway.settings import GatewaySettings

RESPONSES_PER_MB = 64
"""Stored responses for each MiB that they may have; smaller ones take up records of their own."""
MAX_SOCKETS_BYTES = 64 << 20
"""Bytes of the unstored last responses of all WebSockets, which their next messages may continue; the oldest go."""
BODIES_PER_VALUE = 2
"""Size of the largest stored value, in largest bodies."""


def build_store(settings: GatewaySettings, tasks: TaskOwner, pace: BodyPace) -> ResponseStore:
    """Returns the configured store; raises SluiceError for an invalid Redis URL.

    Args:
        pace: schedules the parsing of large values with other large bodies.
    """
    url = settings.responses_redis_url.get_secret_value()
    count, size = RESPONSES_PER_MB * settings.responses_kept_mb, settings.responses_kept_mb << 20
    owner = None if settings.api_keys_file is None else (count // 4, size // 4)
    value = int(BODIES_PER_VALUE * settings.max_body_mb * (1 << 20))
    limits = StoreLimits.of(count, size, owner, value)
    store: ResponseStore
    if url:
        store = RedisStore(url, limits, settings.responses_kept_s, tasks, credentials=settings.redis_credentials)
    else:
        store = MemoryStore(limits, settings.responses_kept_s)
    store.pace = pace
    return store


def last_responses(settings: GatewaySettings) -> MemoryStore:
    """Returns the bounded store of the last responses of all connections, a quarter of it for each tenant."""
    count, size = max(1, max_sockets(settings.max_connections)), MAX_SOCKETS_BYTES
    share = 1 if settings.api_keys_file is None else 4
    limits = StoreLimits.of(count, size, (max(1, count // share), size // share))
    return MemoryStore(limits, MAX_LIFETIME_S)
