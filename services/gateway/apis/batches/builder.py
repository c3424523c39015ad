"""Builds the store, the endpoints and the runner of batches from the settings."""

from __future__ import annotations

import time
from collections.abc import Mapping

from services.common.budgets import Budget
from services.common.intake.pace import BodyPace
from services.gateway.admission.gate import Gate
from services.gateway.admission.permit import Permit
from services.gateway.apis.batches.endpoints import BatchEndpoints, UploadLimits
from services.gateway.apis.batches.executor import MAX_REQUEST_S, BatchExecutor
from services.gateway.apis.batches.lines import line_parser
from services.gateway.apis.batches.memory_store import MemoryBatchStore
from services.gateway.apis.batches.runner import BatchRunner
from services.gateway.apis.batches.shares import FairShares
from services.gateway.apis.batches.store import BatchStore, Limits
from services.gateway.apis.batches.work import Work
from services.gateway.apis.common.http import BodyReader
from services.gateway.http.fast_path import Endpoint
from services.gateway.settings import GatewaySettings
from services.gateway.workers.registry import WorkerRegistry

MAX_FILE_BYTES = 64 << 20
"""Bytes of an uploaded file; a larger one is refused with TOO_LARGE."""
MAX_FILES = 256
"""Uploaded files of a tenant; more are refused, code `storage_limit_exceeded`."""
MAX_BATCHES = 256
"""Stored batches of a tenant; more are OVERLOADED."""
MAX_LINES = 50_000
"""Lines of an uploaded file, including empty ones; a file with more is refused, budget `batch_lines`."""
MAX_BROKEN_LINES = 1_000
"""Lines of a batch that are no requests; with more, the batch fails, budget `broken_lines`."""
_LINES = Budget("batch_lines", MAX_LINES, "")
_BROKEN_LINES = Budget("broken_lines", MAX_BROKEN_LINES, "")


def build_batch_store(settings: GatewaySettings) -> BatchStore:
    """Returns the configured store; raises SluiceError for an invalid Redis URL."""
    of_tenant, of_all = settings.files_kept_bytes
    limits = Limits(MAX_FILES, of_tenant, MAX_BATCHES, of_all)
    url = settings.responses_redis_url.get_secret_value()
    if not url:
        return MemoryBatchStore(limits, settings.files_kept_s)
    from services.gateway.apis.batches.redis_store import RedisBatchStore  # optional: only needed with a Redis URL

    return RedisBatchStore(url, limits, settings.files_kept_s, settings.redis_credentials)


def build_batch_endpoints(
    settings: GatewaySettings, store: BatchStore, bodies: BodyReader, registry: WorkerRegistry
) -> BatchEndpoints:
    """Returns the endpoints of files and batches."""

    def usable(permit: Permit) -> bool:
        if not permit.key.models or settings.wait_for_workers_ms:
            return True
        return any(permit.may_use(name) for name in (*registry.models, *registry.adapters))

    limits = UploadLimits(MAX_FILE_BYTES, _LINES, settings.write_timeout_s, settings.files_kept_s)
    return BatchEndpoints(store, bodies, settings.budgets, usable, limits)


def build_batch_runner(
    settings: GatewaySettings,
    store: BatchStore,
    endpoints: Mapping[str, Endpoint],
    gate: Gate,
    registry: WorkerRegistry,
    pace: BodyPace,
) -> BatchRunner:
    """Returns the runner of batches.

    Args:
        endpoints: by path, as for requests over HTTP.
        pace: schedules large lines with the large bodies of requests.
    """
    executor = BatchExecutor(endpoints, gate, registry, settings.request_timeout_s or MAX_REQUEST_S)
    line_bytes = int(settings.max_body_mb * (1 << 20))
    work = Work(
        store=store,
        executor=executor,
        parse=line_parser(settings.budgets.values, pace),
        lines=_LINES,
        broken_lines=_BROKEN_LINES,
        max_line_bytes=line_bytes,
        concurrency=settings.batch_concurrency,
        slots=FairShares(settings.batch_concurrency),
        memory=FairShares(2 * line_bytes),
        kept_s=settings.files_kept_s,
        clock=time.time,
    )
    return BatchRunner(work)
