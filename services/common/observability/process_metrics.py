"""Metrics of every process of the suite; the label `service` identifies it."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Mapping

from services.common.base import budgets
from services.common.base.errors import SluiceError
from services.common.net import http_policy
from services.common.observability import telemetry
from services.common.observability.declarations import ERROR_KINDS, SECONDS, MetricDeclarations
from services.common.observability.instruments import Counter, Histogram, watch
from services.common.observability.label_bounds import Label
from sluice import __version__

LAG_EVERY_S = 0.5
SERVICES = ("gateway", "preprocess", "router", "worker", "postprocess")

METRICS = MetricDeclarations("process")
SERVICE = Label("service", "which service the process is", SERVICES)
STAGE = Label("stage", "stage of the request pipeline", most=60)
OUTCOME = Label("outcome", "how the stage ended", ("ok", "error", "cancelled"))

BUILD = METRICS.gauge(
    "build_info",
    "1; the version is in the labels",
    SERVICE,
    Label("version", "version of Sluice", most=1),
    Label("python", "version of Python", most=1),
    together="max",
)
LAG = METRICS.histogram(
    "event_loop_lag_seconds",
    f"delay between a timer's due time and its callback, sampled every {LAG_EVERY_S} s",
    SERVICE,
    buckets=SECONDS,
)
STAGES = METRICS.histogram(
    "stage_seconds",
    "duration of a stage; its count gives the rate, its outcome label the errors",
    SERVICE,
    STAGE,
    OUTCOME,
)
ERRORS = METRICS.counter(
    "errors", "typed errors returned to callers, by kind", SERVICE, Label("kind", "kind of the error", ERROR_KINDS)
)
REFUSED = METRICS.counter(
    "refused",
    "requests, messages or streams refused because they exceeded a budget",
    SERVICE,
    Label("budget", "the exceeded budget; docs/security.md lists them with their settings", budgets.NAMES),
)
HTTP_REFUSED = METRICS.counter(
    "http_refused",
    "HTTP requests refused because of their Host, Origin, Sec-Fetch-Site or content type, by any server of the process",
    SERVICE,
    Label("reason", "the header at fault", http_policy.REASONS),
)
SESSIONS = METRICS.gauge("sessions", "open long-lived streams that carry requests, as server or client", SERVICE)
TASKS = METRICS.gauge("tasks", "tasks of the event loop; a steady increase indicates a leak", SERVICE)
SPANS = METRICS.counter(
    "spans",
    "spans recorded, by export outcome",
    SERVICE,
    Label("outcome", "what happened to the spans", ("exported", "failed", "dropped")),
    when="traces are exported (`--otlp-endpoint`)",
)
LINES = METRICS.counter(
    "log_lines",
    "log lines of level warning or above",
    SERVICE,
    Label("level", "level of the line", ("warning", "error")),
)
FETCHES = METRICS.counter(
    "tokenizer_fetches",
    "tokenizers fetched from workers",
    SERVICE,
    Label("outcome", "ok, or the kind of the error", ("ok", *ERROR_KINDS)),
    when="models are discovered from workers (preprocess and postprocess with `--routers`)",
)


class Sessions:
    """Counts the sessions this process has open, as server or client."""

    def __init__(self) -> None:
        self.alive = 0


sessions = Sessions()


class LoopLag:
    """Records how late the event loop runs a periodic timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, record: Histogram, labels: Mapping[str, str]) -> None:
        self._loop = loop
        self._record = record
        self._labels = labels
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts measuring, until `close`."""
        self._due = self._loop.time() + LAG_EVERY_S
        self._timer = self._loop.call_at(self._due, self._on_timer)

    def _on_timer(self) -> None:
        self._record.record(max(0.0, self._loop.time() - self._due), self._labels)
        self.start()

    def close(self) -> None:
        """Stops measuring."""
        if self._timer is not None:
            self._timer.cancel()


class _LogLineCounter(logging.Handler):
    def __init__(self, lines: Counter, service: str) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines
        self._service = service

    def emit(self, record: logging.LogRecord) -> None:
        level = "error" if record.levelno >= logging.ERROR else "warning"
        self._lines.add(1, {"service": self._service, "level": level})


class ProcessMetrics:
    """Instruments of this process; create it after telemetry is configured, in the process's event loop."""

    def __init__(self, service: str, loop: asyncio.AbstractEventLoop) -> None:
        self._labels = {"service": service}
        self._service = service
        self._stages, self._errors, self._refused = Histogram(STAGES), Counter(ERRORS), Counter(REFUSED)
        self._http_refusals = Counter(HTTP_REFUSED)
        self._lag = LoopLag(loop, Histogram(LAG), self._labels)
        self._lines = _LogLineCounter(Counter(LINES), service)

        build = {"service": service, "version": __version__, "python": platform.python_version()}
        watch(BUILD, lambda: [(1, build)])
        watch(TASKS, lambda: [(len(asyncio.all_tasks(loop)), self._labels)])
        watch(SESSIONS, lambda: [(sessions.alive, self._labels)])
        if telemetry.tracing():
            watch(SPANS, lambda: [(n, {**self._labels, "outcome": what}) for what, n in telemetry.spans().items()])

    def start(self) -> None:
        """Starts measuring, until `close`."""
        self._lag.start()
        logging.getLogger().addHandler(self._lines)
        telemetry.on_stage, telemetry.on_error = self._stage_ended, self._error_returned
        budgets.on_refused, http_policy.on_refused = self._budget_exceeded, self._http_refused

    def close(self) -> None:
        """Stops measuring."""
        self._lag.close()
        logging.getLogger().removeHandler(self._lines)
        telemetry.on_stage = telemetry.on_error = None
        budgets.on_refused = http_policy.on_refused = None

    def _stage_ended(self, name: str, seconds: float, error: BaseException | None) -> None:
        outcome = "ok" if error is None else "cancelled" if isinstance(error, asyncio.CancelledError) else "error"
        self._stages.record(seconds, {"service": self._service, "stage": name, "outcome": outcome})

    def _error_returned(self, error: SluiceError) -> None:
        self._errors.add(1, {"service": self._service, "kind": error.kind.name.lower()})

    def _http_refused(self, reason: str) -> None:
        self._http_refusals.add(1, {"service": self._service, "reason": reason})

    def _budget_exceeded(self, budget: str) -> None:
        self._refused.add(1, {"service": self._service, "budget": budget})
