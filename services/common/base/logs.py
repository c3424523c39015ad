"""Structured logs: a sentence plus key=value fields, as human-readable text or JSON lines.

Fields come from `extra={...}`. The current request id, and the trace and span ids while the request is traced, are
added to every line; tasks that serve many requests name theirs with `extra={"request": id}`. Never log prompts or
secrets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanContext

from services.common.base.errors import escaped

MAX_TRACED = 4096
"""Requests whose log lines have the ids of their spans; the oldest is forgotten."""
BAR = "| "
"""Prefix of every line of a traceback in a text log, so that none can imitate a log line."""

request_id: ContextVar[str] = ContextVar("sluice_request_id", default="")

_traced: dict[str, SpanContext] = {}

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def traced(request: str, span: SpanContext) -> None:
    """Adds a span's ids to later log lines about this request; the last `MAX_TRACED` requests are remembered."""
    while len(_traced) >= MAX_TRACED and request not in _traced:
        _traced.pop(next(iter(_traced), ""), None)
    _traced[request] = span


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    named = fields.pop("request", "") or request_id.get()  # set by tasks that serve many requests
    if named:
        fields.setdefault("request_id", named)
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        context = _traced.get(fields.get("request_id", ""), context)
    if context.is_valid:
        fields.setdefault("trace_id", trace.format_trace_id(context.trace_id))
        fields.setdefault("span_id", trace.format_span_id(context.span_id))
    return fields


def _value(value: Any) -> str:
    text = escaped(str(value))
    return json.dumps(text, ensure_ascii=False) if "  " in text else text


class TextFormatter(logging.Formatter):
    """Formats a record as `12:00:00.123 INFO  services.router  worker is up  worker=w1`.

    A record cannot imitate another one: non-printable characters are escaped, values that look like further fields are
    quoted, and traceback lines begin with a bar.
    """

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f"  {escaped(key)}={_value(value)}" for key, value in _fields(record).items())
        line = f"{clock} {record.levelname:<7} {record.name}  {escaped(record.getMessage())}{fields}"
        if not record.exc_info:
            return line
        trace = self.formatException(record.exc_info).split("\n")
        return "\n".join([line, *(f"{BAR}{escaped(text)}" for text in trace)])


class JsonFormatter(logging.Formatter):
    """Formats a record as one ASCII JSON object: time, level, logger, message, then the fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    """Drops gRPC's error logs for handlers that were cancelled by a stopping server or a disconnected caller."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _drop_trace(record: logging.LogRecord) -> bool:
    """Drops the traceback of gRPC's line about an unparseable message: the peer controls how often it is logged."""
    record.exc_info = None
    return True


def configure(service: str, level: str, log_format: str) -> None:
    """Sets up logging for the process, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_not_cancellation)
    logging.getLogger("grpc._common").addFilter(_drop_trace)
    for noisy in ("httpx", "httpcore", "huggingface_hub", "filelock", "asyncio", "uvicorn", "mistral_common"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
