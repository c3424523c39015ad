"""Builds the store of files and batches."""

from __future__ import annotations

from services.gateway.apis.batches.store import BatchStore, Limits, MemoryBatchStore
from services.gateway.settings import GatewaySettings


def build_batch_store(settings: GatewaySettings) -> BatchStore:
    """Returns the configured store; raises SluiceError for an invalid Redis URL."""
    limits = Limits(
        settings.files_kept_per_tenant, settings.files_kept_per_tenant_mb << 20, settings.batches_kept_per_tenant
    )
    url = settings.responses_redis_url.get_secret_value()
    if not url:
        return MemoryBatchStore(limits, settings.files_kept_s)
    from services.gateway.apis.batches.redis_store import RedisBatchStore  # optional: only needed with a Redis URL

    return RedisBatchStore(url, limits, settings.files_kept_s, settings.redis_credentials)
