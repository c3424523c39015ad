"""Adds files and batches to a gateway: store, endpoints and runner."""

from __future__ import annotations

import time

from services.common.base.budgets import Budget
from services.gateway.admission.permit import Permit
from services.gateway.apis.batches.endpoints import BatchEndpoints, UploadLimits, add_batches
from services.gateway.apis.batches.executor import MAX_REQUEST_S, BatchExecutor
from services.gateway.apis.batches.lines import line_parser
from services.gateway.apis.batches.memory_store import MemoryBatchStore
from services.gateway.apis.batches.redis_store import RedisBatchStore
from services.gateway.apis.batches.runner import BatchRunner
from services.gateway.apis.batches.shares import FairShares
from services.gateway.apis.batches.store import BatchStore, Limits
from services.gateway.apis.batches.work import Work
from services.gateway.apis.parts import ApiParts
from services.gateway.apis.routes import ApiRoutes
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.http.json_transport import BodyReader
from services.gateway.operations.registry import Operations
from services.gateway.settings import GatewaySettings

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
    return RedisBatchStore(url, limits, settings.files_kept_s, settings.redis_credentials)


def add_api(parts: ApiParts, routes: ApiRoutes) -> None:
    """Adds the endpoints of files and batches, and the runner of batches."""
    settings = parts.settings
    store = build_batch_store(settings)
    parts.closers.append(store.close)
    add_batches(routes, _endpoints(settings, store, routes.transport.bodies, parts.registry))
    if settings.batch_concurrency:
        parts.background.append(("batches", _runner(parts, store, routes.operations).run))


def _endpoints(
    settings: GatewaySettings, store: BatchStore, bodies: BodyReader, registry: WorkerRegistry
) -> BatchEndpoints:
    def usable(permit: Permit) -> bool:
        if not permit.key.models or settings.wait_for_workers_ms:
            return True
        return any(permit.may_use(name) for name in (*registry.models, *registry.adapters))

    limits = UploadLimits(MAX_FILE_BYTES, _LINES, settings.write_timeout_s, settings.files_kept_s)
    return BatchEndpoints(store, bodies, settings.budgets, usable, limits)


def _runner(parts: ApiParts, store: BatchStore, operations: Operations) -> BatchRunner:
    settings = parts.settings
    parse = line_parser(settings.budgets.values, parts.pace)
    request_s = settings.request_timeout_s or MAX_REQUEST_S
    line_bytes = int(settings.max_body_mb * (1 << 20))
    work = Work(
        store=store,
        executor=BatchExecutor(operations, parts.gate, parts.registry, request_s, parse),
        parse=parse,
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
