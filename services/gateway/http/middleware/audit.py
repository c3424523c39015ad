"""Has every request of a client written into the audit log, whichever API it came through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common import logs
from services.common.observability.audit import AuditEntry, AuditLog, AuditSettings
from services.common.tasks import TaskOwner
from services.gateway import context

OPERATIONS = ("/health", "/ready", "/metrics", "/ui", "/docs", "/redoc", "/openapi.json", "/favicon.ico")


class AuditMiddleware:
    """Around the whole application; what runs the service itself is left out.

    Args:
        entries: where they go.
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
        context.enter(replace(outer, audit=entry))
        naming = logs.request_id.set("")
        try:
            await self._app(scope, _reading(receive, entry) if entry.with_content else receive, _noting(send, entry))
        except BaseException as error:
            entry.outcome = entry.outcome or ("internal" if isinstance(error, Exception) else "cancelled")
            raise
        finally:
            entry.request_id = entry.request_id or logs.request_id.get()
            logs.request_id.reset(naming)
            context.enter(outer)
            self._entries.write(entry)


def attach(app: FastAPI, settings: AuditSettings, tasks: TaskOwner) -> Callable[[], None]:
    """Adds the audit log to an application, if the settings want one; gives what closes it, to be called last.

    Raises:
        SluiceError: as AuditLog.
    """
    if not settings.audit_log:
        return lambda: None
    entries = AuditLog(settings)
    app.add_middleware(AuditMiddleware, entries=entries)
    tasks.spawn(entries.run(), "audit")
    return entries.close


def _noting(send: Send, entry: AuditEntry) -> Send:
    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            entry.status = message["status"]
        await send(message)

    return noting


def _reading(receive: Receive, entry: AuditEntry) -> Receive:
    async def reading() -> Message:
        message = await receive()
        entry.read(message.get("body", b""))
        return message

    return reading
