"""Writes each client's requests to the audit log, for all APIs."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.base import logs
from services.common.base.tasks import TaskOwner
from services.common.observability.audit import AuditEntry, AuditLog, AuditSettings
from services.gateway.core import context

OPERATIONS = ("/health", "/ready", "/metrics", "/ui", "/docs", "/openapi.json", "/favicon.ico")


class AuditMiddleware:
    """Writes an audit entry for each request except operational ones.

    Args:
        entries: audit log to write to.
    """

    def __init__(self, app: ASGIApp, entries: AuditLog) -> None:
        self._app = app
        self._entries = entries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/" or scope["path"].startswith(OPERATIONS):
            await self._app(scope, receive, send)
            return
        entry = AuditEntry(scope["path"], self._entries.with_content)
        outer = context.current()
        context.enter(outer._replace(audit=entry))
        request_id_token = logs.request_id.set("")
        if entry.with_content:
            receive = _recording_body(receive, entry)
        try:
            await self._app(scope, receive, _recording_status(send, entry))
        except BaseException as error:
            entry.outcome = entry.outcome or ("internal" if isinstance(error, Exception) else "cancelled")
            raise
        finally:
            entry.request_id = entry.request_id or logs.request_id.get()
            logs.request_id.reset(request_id_token)
            context.enter(outer)
            self._entries.write(entry)


def open_audit_log(settings: AuditSettings, tasks: TaskOwner) -> AuditLog | None:
    """Returns the audit log, to be closed last; None if the settings disable it.

    Raises:
        SluiceError: as AuditLog.
    """
    if not settings.audit_log:
        return None
    entries = AuditLog(settings)
    tasks.spawn(entries.run(), "audit")
    return entries


def _recording_status(send: Send, entry: AuditEntry) -> Send:
    async def recording_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            entry.status = message["status"]
        await send(message)

    return recording_send


def _recording_body(receive: Receive, entry: AuditEntry) -> Receive:
    async def recording_receive() -> Message:
        message = await receive()
        entry.read(message.get("body", b""))
        return message

    return recording_receive
