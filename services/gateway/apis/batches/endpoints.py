"""The endpoints of files and batches."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, invalid, not_found, quoted
from services.gateway.admission.permit import Permit
from services.gateway.apis.batches.file_content import RANGE_BYTES, FileContent
from services.gateway.apis.batches.lines import count_lines
from services.gateway.apis.batches.multipart import FormPart, read_form
from services.gateway.apis.batches.records import UPLOAD, BatchRecord, FileRecord
from services.gateway.apis.batches.store import WINDOW_S, BatchStore, StoredBatch
from services.gateway.apis.openai.fields import Metadata, Strict
from services.gateway.apis.openai.openapi import responses
from services.gateway.apis.openai.response_schemas import Open
from services.gateway.apis.openai.validation import check
from services.gateway.apis.pagination import page
from services.gateway.apis.routes import ApiRoutes
from services.gateway.core import context
from services.gateway.http.body_budgets import BodyBudgets
from services.gateway.http.json_transport import BodyReader, json_response

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_NAME = 255
"""Characters of the name of an uploaded file; of a longer one the last are kept."""
FAILURES = (400, 401, 403, 404, 413, 500, 503)


class BatchCreateRequest(Strict):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class FileObject(Open):
    """A stored file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str


class BatchObject(Open):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    status: str
    request_counts: dict[str, int]


class Listed(Open):
    """A page of objects."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool


class FileDeleted(Open):
    """A deleted file."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchDeleted(Open):
    """A deleted batch."""

    id: str
    object: Literal["batch"]
    deleted: bool


class UploadLimits(NamedTuple):
    """Bounds on uploaded files: bytes and lines of each, write timeout of a download, and how long they are kept."""

    file_bytes: int
    lines: Budget
    write_s: float
    kept_s: float


class BatchEndpoints:
    """Handlers of files and batches; a tenant has access to its own only.

    Args:
        bodies: reads the bodies of requests.
        usable: returns whether the request's key may use a model that is served.
        limits: of uploaded files.
    """

    def __init__(
        self,
        store: BatchStore,
        bodies: BodyReader,
        budgets: BodyBudgets,
        usable: Callable[[Permit], bool],
        limits: UploadLimits,
    ) -> None:
        self._store = store
        self._bodies = bodies
        self._budgets = budgets
        self._usable = usable
        self._limits = limits

    async def create_file(self, request: Request) -> Response:
        """Upload a file of requests for a batch."""
        if not self._usable(context.current().permit):
            message = "The API key may use none of the models that are served here, so it cannot store files."
            raise SluiceError(ErrorKind.PERMISSION_DENIED, message, code="model_not_allowed")
        body = await self._bodies.read_form(request, self._limits.file_bytes)
        form = read_form(body, request.headers.get("content-type", ""))
        purpose, file = form.get("purpose", FormPart("", b"")).content.decode("utf-8", "replace"), form.get("file")
        if purpose != UPLOAD:
            raise invalid("purpose must be batch.", param="purpose", code="invalid_value")
        if file is None:
            raise invalid("Missing required parameter: file.", param="file", code="missing_required_parameter")
        lines = await count_lines(file.content)
        if lines > (limit := self._limits.lines.limit):
            reason = f"The file has {lines} lines, including empty ones; the limit is {limit}"
            raise self._limits.lines.refuse(reason, param="file", code="too_many_lines")
        now, size = int(time.time()), len(file.content)
        name, kept_until = file.filename[-MAX_NAME:] or "upload.jsonl", now + int(self._limits.kept_s)
        record = FileRecord(f"file-{secrets.token_hex(12)}", name, UPLOAD, size, now, kept_until, lines)
        await self._store.add_file(_owner(), record, file.content)
        return json_response(record.shown())

    async def list_files(self, request: Request) -> Response:
        """List the stored files."""
        purpose = request.query_params.get("purpose", "")
        shown = [file.shown() for file in await self._store.files(_owner())]
        return json_response(page([file for file in shown if purpose in ("", file["purpose"])], request.query_params))

    async def retrieve_file(self, request: Request) -> Response:
        """Retrieve a file's object."""
        return json_response((await self._file(request)).shown())

    async def file_content(self, request: Request) -> Response:
        """Retrieve a file's content."""
        file = await self._file(request)
        read = partial(self._store.read, _owner(), file.id)
        first = await read(0, RANGE_BYTES)
        if first is None or (file.size and not first):
            raise _no_file(file.id)
        return FileContent(first, read, file.size, self._limits.write_s)

    async def delete_file(self, request: Request) -> Response:
        """Delete a file; batches that have not run all of its lines fail."""
        file = await self._file(request)
        await self._store.remove_file(_owner(), file.id)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def create_batch(self, request: Request) -> Response:
        """Run the requests of a file in the background, at the lowest priority."""
        fields = check(BatchCreateRequest, await self._bodies.read(request), self._budgets)
        owner, now = _owner(), int(time.time())
        file = await self._store.file(owner, fields.input_file_id)
        if file is None:
            raise _no_file(fields.input_file_id, "input_file_id")
        batch = BatchRecord(
            f"batch_{secrets.token_hex(12)}",
            owner,
            context.current().permit.key.id,
            fields.endpoint,
            file.id,
            fields.completion_window,
            now,
            times={"expires_at": now + WINDOW_S},
            metadata=fields.metadata,
        )
        await self._store.add_batch(batch, file.lines)
        return json_response(batch.shown(0, 0))

    async def list_batches(self, request: Request) -> Response:
        """List the batches."""
        shown = [_shown(stored) for stored in await self._store.batches(_owner())]
        return json_response(page(shown, request.query_params))

    async def retrieve_batch(self, request: Request) -> Response:
        """Retrieve a batch."""
        return json_response(_shown(await self._batch(request)))

    async def cancel_batch(self, request: Request) -> Response:
        """Cancel a batch; the results of its requests that have run stay."""
        stored = await self._batch(request)
        if not await self._store.cancel(_owner(), stored.record.id, int(time.time())):
            raise invalid(f"The batch is {stored.record.status} and cannot be cancelled.", code="not_cancellable")
        return json_response(_shown(await self._batch(request)))

    async def delete_batch(self, request: Request) -> Response:
        """Delete a batch that has ended, with the files of its results."""
        stored = await self._batch(request)
        if not await self._store.remove_batch(_owner(), stored.record.id):
            message = f"The batch is {stored.record.status}; cancel it, and delete it after its end."
            raise invalid(message, param="batch_id", code="batch_in_progress")
        return json_response({"id": stored.record.id, "object": "batch", "deleted": True})

    async def _file(self, request: Request) -> FileRecord:
        name = request.path_params["file_id"]
        file = await self._store.file(_owner(), name)
        if file is None:
            raise _no_file(name)
        return file

    async def _batch(self, request: Request) -> StoredBatch:
        name = request.path_params["batch_id"]
        stored = await self._store.batch(_owner(), name)
        if stored is None:
            raise not_found(f"Batch {quoted(name)} does not exist.", param="batch_id", code="batch_not_found")
        return stored


def _owner() -> str:
    return context.current().permit.owner


def _shown(stored: StoredBatch) -> dict[str, Any]:
    return stored.record.shown(stored.completed, stored.failed)


def _no_file(name: str, param: str = "file_id") -> SluiceError:
    return not_found(f"File {quoted(name)} does not exist.", param=param, code="file_not_found")


def add_batches(routes: ApiRoutes, endpoints: BatchEndpoints) -> None:
    """Adds the routes."""
    add = partial(routes.add_http, tag="Batches")
    file_id, batch_id = (
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in ("file_id", "batch_id")
    )
    limits = [
        {
            "name": "limit",
            "in": "query",
            "required": False,
            "schema": {"type": "integer", "minimum": 1, "maximum": 100},
        },
        {"name": "after", "in": "query", "required": False, "schema": {"type": "string"}},
        {"name": "order", "in": "query", "required": False, "schema": {"enum": ["asc", "desc"]}},
    ]
    purpose = {"name": "purpose", "in": "query", "required": False, "schema": {"type": "string"}}
    file, listed, batch = (responses(answer, FAILURES) for answer in (FileObject, Listed, BatchObject))
    content: dict[int | str, Any] = {
        **responses(FileObject, FAILURES),
        200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}, "description": "The content."},
    }
    add("/v1/files", endpoints.create_file, file)
    add("/v1/files", endpoints.list_files, listed, method="GET", parameters=[*limits, purpose])
    add("/v1/files/{file_id}", endpoints.retrieve_file, file, method="GET", parameters=[file_id])
    add("/v1/files/{file_id}/content", endpoints.file_content, content, method="GET", parameters=[file_id])
    deleted = responses(FileDeleted, FAILURES)
    add("/v1/files/{file_id}", endpoints.delete_file, deleted, method="DELETE", parameters=[file_id])
    add("/v1/batches", endpoints.create_batch, batch, body=BatchCreateRequest)
    add("/v1/batches", endpoints.list_batches, listed, method="GET", parameters=limits)
    add("/v1/batches/{batch_id}", endpoints.retrieve_batch, batch, method="GET", parameters=[batch_id])
    removed = responses(BatchDeleted, FAILURES)
    add("/v1/batches/{batch_id}", endpoints.delete_batch, removed, method="DELETE", parameters=[batch_id])
    add("/v1/batches/{batch_id}/cancel", endpoints.cancel_batch, batch, parameters=[batch_id])
