"""Runs the requests of batches through the endpoints of the gateway, when interactive requests leave room."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.types import Message

from services.common.errors import SluiceError, internal
from services.gateway import context
from services.gateway.admission.gate import Gate
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.scopes import Scope
from services.gateway.apis.batches.lines import BatchLine
from services.gateway.apis.openai.fields import MAX_PRIORITY
from services.gateway.core.deadlines import Deadline
from services.gateway.http.body import release_body
from services.gateway.http.errors import error_response
from services.gateway.http.fast_path import Endpoint
from services.gateway.workers.registry import WorkerRegistry

log = logging.getLogger(__name__)

WITHOUT_PRIORITY = "/v1/embeddings"
MAX_REQUEST_S = 3_600.0
"""Seconds of one line of a batch where `--request-timeout-s` is 0; then the line fails."""
ATTEMPTS = 6
FIRST_PAUSE_S = 0.5
_RETRIED = (429, 502, 503)


class BatchExecutor:
    """Runs requests with the permissions and limits of a key, at the lowest priority.

    Args:
        endpoints: by path, as for requests over HTTP.
        request_s: most seconds of a request.
    """

    def __init__(
        self, endpoints: Mapping[str, Endpoint], gate: Gate, registry: WorkerRegistry, request_s: float
    ) -> None:
        self._endpoints = endpoints
        self._gate = gate
        self._registry = registry
        self._request_s = request_s

    async def run(self, path: str, key_id: str, line: BatchLine) -> tuple[int, bytes]:
        """Returns the status and the body of a response; failures that pass are retried."""
        pause_s, status, answer = FIRST_PAUSE_S, 500, b"null"
        for attempt in range(ATTEMPTS):
            status, answer = await self._once(path, key_id, line)
            if status not in _RETRIED or attempt == ATTEMPTS - 1:
                break
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return status, answer

    async def _once(self, path: str, key_id: str, line: BatchLine) -> tuple[int, bytes]:
        task = asyncio.get_running_loop().create_task(self._answered(path, key_id, line))  # a context of its own
        try:
            return await task
        finally:
            task.cancel()

    async def _answered(self, path: str, key_id: str, line: BatchLine) -> tuple[int, bytes]:
        try:
            key = self._gate.key_of(key_id)
            line.needs.check(self._gate.uncounted(key))
            permit = await self._gate.enter_in_background(_with_priority(key))
        except SluiceError as error:
            return _answer_of(error)
        try:
            deadline = Deadline.after(self._request_s)
            context.enter(replace(context.NO_CONTEXT, permit=permit, deadline=deadline))
            return await self._call(path, self._body(path, line))
        except SluiceError as error:
            return _answer_of(error)
        except Exception:  # one line must not end the work on the others
            log.exception("a request of a batch failed")
            return _answer_of(internal("Unexpected failure in the gateway; see its log for details."))
        finally:
            self._gate.leave(permit)

    async def _call(self, path: str, text: bytes) -> tuple[int, bytes]:
        messages: list[Message] = [{"type": "http.request", "body": text, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else await asyncio.get_running_loop().create_future()

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        try:
            response = await self._endpoints[path](Request(scope, receive))
        finally:
            release_body(scope)
        return response.status_code, bytes(response.body)

    def _body(self, path: str, line: BatchLine) -> bytes:
        """Returns the body of a line with the lowest priority, where there are priorities."""
        priority = line.priority
        if path != WITHOUT_PRIORITY and line.model and self._registry.has_capability(line.model, "priority"):
            priority = MAX_PRIORITY
        if priority is None:
            return line.body
        rest = b"," + line.body[1:] if len(line.body) > 2 else b"}"
        return b'{"priority":' + orjson.dumps(priority) + rest


def _with_priority(key: ApiKey) -> ApiKey:
    """Returns the key with the permission to set the lowest priority; the client's own priority is checked before."""
    return replace(key, scopes=key.scopes | {Scope.PRIORITY})


def _answer_of(error: SluiceError) -> tuple[int, bytes]:
    response = error_response(error)
    return response.status_code, bytes(response.body)
