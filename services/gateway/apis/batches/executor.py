"""The batch transport: runs the lines of batches through operations, when interactive requests leave room."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import orjson

from services.common.base.errors import SluiceError, internal
from services.gateway.admission.gate import Gate
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.scopes import Scope
from services.gateway.apis.batches.lines import BatchLine, Parse
from services.gateway.apis.openai.fields import MAX_PRIORITY
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.core import context
from services.gateway.core.deadlines import Deadline
from services.gateway.http.errors import error_body
from services.gateway.operations.operation import NO_CALLER, Whole
from services.gateway.operations.registry import Operations

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
        parse: parses the body of a line.
        request_s: most seconds of a request.
    """

    def __init__(
        self, operations: Operations, gate: Gate, registry: WorkerRegistry, request_s: float, parse: Parse
    ) -> None:
        self._operations = operations
        self._parse = parse
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
            context.enter(context.NO_CONTEXT._replace(permit=permit, deadline=deadline))
            return await self._call(path, line)
        except SluiceError as error:
            return _answer_of(error)
        except Exception:  # one line must not end the work on the others
            log.exception("a request of a batch failed")
            return _answer_of(internal("Unexpected failure in the gateway; see its log for details."))
        finally:
            self._gate.leave(permit)

    async def _call(self, path: str, line: BatchLine) -> tuple[int, bytes]:
        body = await self._parse(line.body)  # anew for each attempt: operations may change it
        priority = line.priority
        if path != WITHOUT_PRIORITY and line.model and self._registry.has_capability(line.model, "priority"):
            priority = MAX_PRIORITY
        if priority is not None:
            body["priority"] = priority
        answer = await self._operations.of(path)(body, NO_CALLER)
        if not isinstance(answer, Whole):
            raise internal("A request of a batch was not answered as a whole.")
        return 200, orjson.dumps(answer.content)


def _with_priority(key: ApiKey) -> ApiKey:
    """Returns the key with the permission to set the lowest priority; the client's own priority is checked before."""
    return replace(key, scopes=key.scopes | {Scope.PRIORITY})


def _answer_of(error: SluiceError) -> tuple[int, bytes]:
    return error.http_status, orjson.dumps(error_body(error))
