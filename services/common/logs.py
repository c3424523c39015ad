"""Structured logs: a sentence plus key=value fields, as text for people or JSON lines for machines.

Fields come from `extra={...}`; the id of the request being served and, while it is traced, the ids of its trace and
span are added to every line by themselves: also to lines that a task writes which serves many requests, if they name
theirs. Prompts and secrets do not belong in either.
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

from services.common.errors import escaped

MOST_TRACED = 4096
BAR = "| "
"""Begins every line of an exception in a text log: none of them can be taken for a line of the log."""

request_id: ContextVar[str] = ContextVar("sluice_request_id", default="")

_traced: dict[str, SpanContext] = {}

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def traced(request: str, span: SpanContext) -> None:
    """From now on lines about this request carry the ids of a span; those of the last few thousand are kept."""
    while len(_traced) >= MOST_TRACED and request not in _traced:
        _traced.pop(next(iter(_traced), ""), None)
    _traced[request] = span


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    named = fields.pop("request", "") or request_id.get()  # `extra={"request": id}` where many are served by one task
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
    """Writes a record as `12:00:00.123 INFO  services.router  worker is up  worker=w1`.

    A record cannot imitate another one: what is not printable is escaped, values that could be taken for further fields
    are quoted, and the lines of an exception begin with a bar.
    """

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f"  {escaped(key)}={_value(value)}" for key, value in _fields(record).items())
        line = f"{clock} {record.levelname:<7} {record.name}  {escaped(record.getMessage())}{fields}"
        if not record.exc_info:
            return line
        trace = self.formatException(record.exc_info).split("\n")
        return "\n".join([line, *(f"{BAR}{escaped(each)}" for each in trace)])


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII: time, level, logger, message, then the fields."""

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


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """grpc reports handlers that are cancelled when a server stops or a caller leaves as if they had failed."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _drop_trace(record: logging.LogRecord) -> bool:
    """Drops the trace from grpc's line about a message that it cannot parse: a peer chooses how often it is logged."""
    record.exc_info = None
    return True


def configure(service: str, level: str, log_format: str) -> None:
    """Sets up logging for the process: everything goes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_cancellation)
    logging.getLogger("grpc._common").addFilter(_drop_trace)
    for noisy in ("httpx", "httpcore", "huggingface_hub", "filelock", "asyncio", "uvicorn", "mistral_common"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
